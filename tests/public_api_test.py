import ast
import importlib
import inspect
import pathlib

import pytest

_PACKAGE = pathlib.Path(__file__).parents[1] / 'scalerl_jax'
_FILES = sorted(_PACKAGE.rglob('*.py'))
_SUBPACKAGES = [
  f'scalerl_jax.{p.parent.name}' for p in sorted(_PACKAGE.glob('*/__init__.py'))
]
# Names and meanings that the design fixes.
_FIXED = {
  'losses': (
    'cispo',
    'clipped_surrogate',
    'gspo',
    'reinforce',
    'kl_k1',
    'kl_k2',
    'kl_k3',
    'token_logps',
  ),
  'advantages': (
    'centered',
    'group_normalized',
    'batch_normalized',
    'leave_one_out',
  ),
  'aggregation': (
    'token_mean',
    'sequence_mean',
    'prompt_mean',
    'fixed_length',
  ),
  'filters': ('zero_variance',),
  'length_control': ('overlong_penalty', 'Interruption'),
  'curriculum': ('PassRates', 'update', 'active'),
  'curves': (
    'sigmoid',
    'SigmoidParams',
    'fit',
    'SigmoidFit',
    'fit_power_law',
    'bootstrap',
    'forecast',
    'verdict',
    'compare',
  ),
  'recipes': (
    'Recipe',
    'scalerl',
    'grpo',
    'dapo',
    'magistral',
    'minimax_m1',
    'dr_grpo',
    'gspo',
  ),
  'training': ('make_train_step', 'TrainState', 'StepMetrics'),
}


def _public_definitions():
  """Yields (where, node) of public functions, classes and their methods."""
  for path in _FILES:
    name = path.relative_to(_PACKAGE).as_posix()
    yield from _within(name, ast.parse(path.read_text()))


def _within(name, parent):
  for node in parent.body:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue
    if node.name.startswith('_'):
      continue
    yield f'{name}:{node.name}', node
    if isinstance(node, ast.ClassDef):
      yield from _within(f'{name}:{node.name}', node)


_DEFINITIONS = dict(_public_definitions())
_FUNCTIONS = {
  where: node
  for where, node in _DEFINITIONS.items()
  if isinstance(node, ast.FunctionDef) and where.count(':') == 1
}


def _arguments(node):
  a = node.args
  every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
  return [x.arg for x in every if x is not None]


@pytest.mark.parametrize('path', _FILES, ids=lambda p: p.stem)
def test_module_says_what_it_is(path):
  assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize('where', _DEFINITIONS)
def test_definition_has_a_summary_of_one_line(where):
  doc = ast.get_docstring(_DEFINITIONS[where])
  assert doc
  summary = doc.split('\n\n')[0]
  assert '\n' not in summary
  assert summary[0].isupper() or summary[0] in '0123456789`'
  assert summary.endswith(('.', ':'))


@pytest.mark.parametrize(
  'where', [w for w, node in _FUNCTIONS.items() if _arguments(node)]
)
def test_function_describes_each_argument(where):
  doc = ast.get_docstring(_FUNCTIONS[where])
  args = doc.partition('Args:')[2].partition('\n\n')[0]
  for name in _arguments(_FUNCTIONS[where]):
    assert f' {name}:' in args or f'*{name}:' in args or f' {name},' in args


@pytest.mark.parametrize(
  'where',
  [
    w
    for w, node in _FUNCTIONS.items()
    if node.returns is not None
    and ast.unparse(node.returns) != 'None'
    and _arguments(node)
  ],
)
def test_function_describes_its_result(where):
  doc = ast.get_docstring(_FUNCTIONS[where])
  assert 'Returns:' in doc or 'Yields:' in doc


@pytest.mark.parametrize('where', _FUNCTIONS)
def test_signature_is_annotated(where):
  node = _FUNCTIONS[where]
  assert node.returns is not None
  for arg in [*node.args.args, *node.args.kwonlyargs]:
    assert arg.annotation is not None, arg.arg


@pytest.mark.parametrize('name', _SUBPACKAGES)
def test_names_of_a_subpackage_exist_and_are_documented(name):
  module = importlib.import_module(name)
  names = getattr(module, '__all__', ())
  # Constants, classes, functions, as the linter has them too.
  assert list(names) == sorted(
    names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)
  )
  for item in names:
    value = getattr(module, item)
    if inspect.isclass(value) or callable(value):
      assert inspect.getdoc(value), item


@pytest.mark.parametrize(
  ('module', 'name'), [(m, n) for m, names in _FIXED.items() for n in names]
)
def test_fixed_name_is_there(module, name):
  found = importlib.import_module(f'scalerl_jax.{module}')
  assert inspect.getdoc(getattr(found, name))
  if hasattr(found, '__all__'):
    assert name in found.__all__


_PURE_FUNCTIONS = [
  (where, node)
  for where, node in _FUNCTIONS.items()
  if where.split(':')[0].split('/')[0]
  in ('losses', 'advantages.py', 'aggregation.py', 'filters.py')
]


@pytest.mark.parametrize('where', [w for w, _ in _PURE_FUNCTIONS])
def test_settings_are_keyword_only(where):
  """Arrays are positional and without a default, everything else keyword."""
  node = _FUNCTIONS[where]
  assert not node.args.defaults
  for arg in node.args.args:
    text = ast.unparse(arg.annotation)
    assert 'Array' in text or text in ('jax.typing.ArrayLike',), arg.arg
