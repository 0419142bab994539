"""Checks of single fields of a section; all raise ValueError."""

from typing import Any


def at_least(section: Any, minimum: int | float, *names: str) -> None:
  """Checks that fields are not below a minimum.

  Args:
    section: The section.
    minimum: Smallest value allowed.
    *names: Fields of it.
  """
  for name in names:
    value = getattr(section, name)
    if value < minimum:
      raise ValueError(f'{name}={value} must be at least {minimum}')


def positive(section: Any, *names: str) -> None:
  """Checks that fields are positive.

  Args:
    section: The section.
    *names: Fields of it.
  """
  for name in names:
    if not getattr(section, name) > 0:
      raise ValueError(f'{name}={getattr(section, name)} must be positive')


def one_of(section: Any, name: str, allowed: tuple[str, ...]) -> None:
  """Checks that a field is one of the allowed words.

  Args:
    section: The section.
    name: Field of it.
    allowed: The words.
  """
  if getattr(section, name) not in allowed:
    raise ValueError(
      f'{name}={getattr(section, name)!r} must be one of {list(allowed)}'
    )
