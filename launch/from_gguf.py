"""Writes a GGUF file as a checkpoint that a run can start from.

    python launch/from_gguf.py FILE.gguf OUT [--dtype=bfloat16|float32]

    --dtype    of the stored weights

The file must be of the llama architecture with the tokenizer of SmolLM2. OUT
must not exist; it appears whole or not at all. Bad input ends with one line on
stderr and exit code 2, what cannot be written with exit code 1.
"""

from collections.abc import Sequence
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
  flags.DEFINE_enum('dtype', _DTYPES[0], _DTYPES, '', flag_values=found)
  try:
    rest = found(list(argv))[1:]
  except flags.Error as error:
    return _fail(error, 2)
  if len(rest) != 2:
    return _fail('give FILE.gguf and OUT; --help tells more', 2)
  from scalerl_jax import hf
  from scalerl_jax import models

  try:
    spec = hf.convert_gguf(*rest, dtype=found.dtype)
  except hf.HfError as error:
    return _fail(error, 2)
  except OSError as error:
    return _fail(error, 1)
  count = models.num_parameters(spec)
  print(f'wrote {rest[1]}: {count} parameters, {found.dtype}')
  return 0


def _fail(error: object, code: int) -> int:
  print('error:', ' '.join(str(error).split()), file=sys.stderr)
  return code


if __name__ == '__main__':
  sys.exit(main(sys.argv))
