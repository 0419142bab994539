"""What a compiled program sends between devices, from its text (HLO)."""

from collections.abc import Mapping
import math
import re

KINDS = (
  'all-gather',
  'reduce-scatter',
  'all-reduce',
  'all-to-all',
  'collective-permute',
)

# A computation begins at the margin: '%name (parameters) -> result {'.
_COMPUTATION = re.compile(r'^(ENTRY )?%?([^\s(]+) \(.*\{$')
_COLLECTIVE = re.compile(rf' = (.*?) ({"|".join(KINDS)})(-done)?\(')
_CALLED = re.compile(
  r'(?:body|calls|to_apply|true_computation|false_computation)=%?([^\s,})]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r'\b(pred|[a-z]+?(\d+)[a-z0-9]*)\[([\d,]*)\]')


def collective_bytes(text: str) -> dict[str, int]:
  """Adds up the results of the collectives that one device executes.

  An operation counts with the bytes of its result on one device, as often as
  the loops around it run where the text says so (`known_trip_count`), and once
  per turn of a loop of unknown length otherwise. The links carry somewhat else:
  in a ring of n devices an all-gather and an all-to-all move (n - 1) / n of it,
  an all-reduce twice that, a reduce-scatter n - 1 times its result.

  Args:
    text: Of a compiled program, `compiled.as_text()`.

  Returns:
    Kind → bytes, in the order of `KINDS`; kinds that do not occur are left out.
  """
  own: dict[str, dict[str, int]] = {}
  calls: dict[str, list[tuple[str, int]]] = {}
  entry = name = ''
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      name = start[2]
      own[name], calls[name] = {}, []
      entry = name if start[1] else entry
      continue
    if found := _COLLECTIVE.search(line):
      kind = found[2]
      own[name][kind] = own[name].get(kind, 0) + _bytes(found[1])
    called = _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
      called += [n.strip(' %') for n in names.split(',')]
    if called:
      trips = _TRIPS.search(line) if ' while(' in line else None
      calls[name] += [(c, int(trips[1]) if trips else 1) for c in called]
  totals = _totals(entry, own, calls, {})
  return {kind: totals[kind] for kind in KINDS if kind in totals}


def _totals(
  name: str,
  own: Mapping[str, dict[str, int]],
  calls: Mapping[str, list[tuple[str, int]]],
  done: dict[str, dict[str, int]],
) -> dict[str, int]:
  if name not in done:
    totals = dict(own.get(name, {}))
    for called, times in calls.get(name, []):
      for kind, size in _totals(called, own, calls, done).items():
        totals[kind] = totals.get(kind, 0) + times * size
    done[name] = totals
  return done[name]


def _bytes(shape: str) -> int:
  """Of a shape as it is printed, 'f32[2,3]{1,0}' or a tuple of such."""
  return sum(
    math.prod(int(n) for n in sizes.split(',') if n)
    * (1 if dtype == 'pred' else max(int(bits), 8) // 8)
    for dtype, bits, sizes in _ARRAY.findall(shape)
  )
