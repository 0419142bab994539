"""From a ConfigDict to a `RunConfig` and back."""

from collections.abc import Mapping
import dataclasses
import math
import types
import typing
from typing import Any

import ml_collections

from scalerl_jax import hf
from scalerl_jax.config import run_config

# Of the computation: a checkpoint does not fix them.
_FREE = ('dtype', 'remat')


class ConfigError(ValueError):
  """A configuration that cannot run; the message is one line."""


def from_config_dict(
  config: ml_collections.ConfigDict | Mapping[str, Any],
) -> run_config.RunConfig:
  """Reads and checks a configuration.

  Where `model.path` names a checkpoint, the sizes of the model that are not
  written are filled in from it, and those that are written must agree.

  Args:
    config: A ConfigDict, or nested mappings.

  Returns:
    The configuration.

  Raises:
    ConfigError: A field is unknown, missing, of the wrong type or out of its
      range, fields contradict each other or the checkpoint, or it cannot be
      used.
  """
  tree = _with_checkpoint(_to_mapping(config, 'config'))
  parsed = _parse(run_config.RunConfig, tree, '')
  assert isinstance(parsed, run_config.RunConfig)
  return parsed


def to_dict(config: run_config.RunConfig) -> dict[str, Any]:
  """Turns a configuration into nested dicts of JSON values.

  Args:
    config: The configuration.

  Returns:
    What `from_config_dict` reads back to an equal configuration.
  """
  return dataclasses.asdict(config, dict_factory=_to_json)


def _to_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
  return {k: list(v) if isinstance(v, tuple) else v for k, v in fields}


def differences(
  before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
  """Lists the fields in which two configurations differ.

  Args:
    before: From `to_dict`, perhaps through JSON.
    after: The same.

  Returns:
    'field: before -> after' for each, sorted by field.
  """
  old, new = _flatten(before, ''), _flatten(after, '')
  missing = '(none)'
  return [
    f'{name}: {old.get(name, missing)} -> {new.get(name, missing)}'
    for name in sorted(old.keys() | new.keys())
    if old.get(name, missing) != new.get(name, missing)
  ]


def _with_checkpoint(tree: Mapping[str, Any]) -> Mapping[str, Any]:
  model = _to_mapping(tree.get('model', {}), 'model')
  path = model.get('path')
  if not path or not isinstance(path, str):
    return tree
  try:
    found = dataclasses.asdict(hf.spec_from_hf(hf.read_config(path)))
  except hf.HfError as error:
    raise ConfigError(f'model.path={path!r}: {error}') from None
  sizes = {name: value for name, value in found.items() if name not in _FREE}
  # A vocabulary of 0 is one that is not written.
  written = {k: v for k, v in model.items() if (k, v) != ('vocab_size', 0)}
  return {**tree, 'model': _filled(written, sizes, 'model')}


def _filled(written: Any, found: Any, name: str) -> Any:
  if isinstance(written, Mapping) and isinstance(found, Mapping):
    inner = {
      key: _filled(written.get(key, value), value, f'{name}.{key}')
      for key, value in found.items()
    }
    return {**written, **inner}
  if written != found:
    raise ConfigError(
      f'{name}={written!r} must be that of the checkpoint model.path,'
      f' {found!r}; or do not write it'
    )
  return written


def _flatten(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in node.items():
    if isinstance(value, Mapping):
      flat |= _flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def _parse(cls: type[Any], node: Any, prefix: str) -> Any:
  """Builds a section; `prefix` is '' or ends in a dot."""
  where = prefix.rstrip('.') or 'config'
  values = _to_mapping(node, where)
  fields = {f.name: f for f in dataclasses.fields(cls)}
  for name in values:
    if name not in fields:
      raise ConfigError(
        f'{prefix}{name} is not a field; {where} has {sorted(fields)}'
      )
  types = typing.get_type_hints(cls)
  parsed = {}
  for name, field in fields.items():
    if name in values:
      parsed[name] = _convert(types[name], values[name], prefix + name)
    elif dataclasses.is_dataclass(types[name]):
      parsed[name] = _parse(types[name], {}, f'{prefix}{name}.')
    elif _is_required(field):
      raise ConfigError(f'{prefix}{name} is missing; it has no default')
  try:
    return cls(**parsed)
  except ValueError as error:
    # Some sections say their own name.
    text = str(error).removeprefix(f'{where.rpartition(".")[2]}.')
    raise ConfigError(f'{prefix}{text}') from None


def _convert(kind: Any, value: Any, name: str) -> Any:
  if isinstance(kind, types.UnionType):  # A section, or None.
    if value is None:
      return None
    kind = typing.get_args(kind)[0]
  if dataclasses.is_dataclass(kind):
    return _parse(typing.cast(type[Any], kind), value, f'{name}.')
  if typing.get_origin(kind) is dict:
    return dict(_to_mapping(value, name))
  if typing.get_origin(kind) is tuple:
    # JSON and ConfigDict have lists.
    if not isinstance(value, (list, tuple)):
      raise ConfigError(
        f'{name}={value!r} must be a list, got {type(value).__name__}'
      )
    item = typing.get_args(kind)[0]
    return tuple(_convert(item, v, f'{name}[{i}]') for i, v in enumerate(value))
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if kind is float and is_number:
    if not math.isfinite(value):
      raise ConfigError(f'{name}={value} must be finite')
    return float(value)
  # A bool is an int, but not a count.
  if type(value) is not kind:
    raise ConfigError(
      f'{name}={value!r} must be of type {kind.__name__}, got'
      f' {type(value).__name__}'
    )
  return value


def _to_mapping(node: Any, name: str) -> Mapping[str, Any]:
  if isinstance(node, ml_collections.ConfigDict):
    node = node.to_dict()
  if not isinstance(node, Mapping):
    raise ConfigError(
      f'{name}={node!r} must be a section of fields, got {type(node).__name__}'
    )
  return node


def _is_required(field: 'dataclasses.Field[Any]') -> bool:
  return (
    field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  )


def one_line(error: Exception) -> str:
  """Tells a user in one line what is wrong with a command line.

  Args:
    error: What was raised while flags and the config file were read.

  Returns:
    The line.
  """
  if isinstance(error, (AttributeError, KeyError)):
    # The message is a repr inside a repr, of the field and a suggestion.
    name, *hint = str(error.args[0]).replace('\\n', '\n').splitlines()
    field = name.strip('"\\\'')
    return ' '.join([f'--config has no field {field!r}.', *hint]).rstrip(
      '"\\\''
    )
  text = str(error)
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if 'Traceback' in text or 'Failed loading' in text:
    return lines[-1]
  return ' '.join(lines)
