"""Writes the policy of a run as a checkpoint that transformers and SGLang load.

    python launch/convert.py RUN_DIRECTORY OUT [--updates=N]
        [--dtype=bfloat16|float32]

    --updates  which checkpoint of the run; default: the newest
    --dtype    of the stored weights

OUT must not exist; it appears whole or not at all. Bad input ends with one line
on stderr and exit code 2, what cannot be read or written with exit code 1.
"""

from collections.abc import Sequence
import pathlib
import sys

from absl import flags

_DTYPES = ('bfloat16', 'float32')


def main(argv: Sequence[str]) -> int:
  """Runs one command line.

  Args:
    argv: Arguments, the program's name first.

  Returns:
    The exit code.
  """
  if any(a.lstrip('-') in ('help', 'h') for a in argv[1:]):
    print(__doc__)
    return 0
  # Not the global ones: those of one command line must not reach the next.
  found = flags.FlagValues()
  found.set_gnu_getopt(True)
  flags.DEFINE_integer('updates', None, '', lower_bound=0, flag_values=found)
  flags.DEFINE_enum('dtype', _DTYPES[0], _DTYPES, '', flag_values=found)
  try:
    rest = found(list(argv))[1:]
  except flags.Error as error:
    return _fail(error, 2)
  if len(rest) != 2:
    return _fail('give RUN_DIRECTORY and OUT; --help tells more', 2)
  from scalerl_jax import build
  from scalerl_jax.training import checkpointing

  try:
    updates = build.export(
      *map(pathlib.Path, rest), updates=found.updates, dtype=found.dtype
    )
  except ValueError as error:
    return _fail(error, 2)
  except (OSError, checkpointing.CheckpointError) as error:
    return _fail(error, 1)
  print(f'wrote {rest[1]}: {updates} updates, {found.dtype}')
  return 0


def _fail(error: object, code: int) -> int:
  print('error:', ' '.join(str(error).split()), file=sys.stderr)
  return code


if __name__ == '__main__':
  sys.exit(main(sys.argv))
