"""Checks of single fields of a section; all raise ValueError."""

from typing import Any


def at_least(section: Any, minimum: int | float, *names: str) -> None:
  """Checks that fields of `section` are not below a minimum."""
  for name in names:
    value = getattr(section, name)
    if value < minimum:
      raise ValueError(f'{name}={value} must be at least {minimum}')


def positive(section: Any, *names: str) -> None:
  """Checks that fields of `section` are positive."""
  for name in names:
    if not getattr(section, name) > 0:
      raise ValueError(f'{name}={getattr(section, name)} must be positive')


def one_of(section: Any, name: str, allowed: tuple[str, ...]) -> None:
  """Checks that a field of `section` is one of the allowed words."""
  if getattr(section, name) not in allowed:
    raise ValueError(
      f'{name}={getattr(section, name)!r} must be one of {list(allowed)}'
    )
