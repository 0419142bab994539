"""Imports go downwards only; the pure layers know no outside world."""

import ast
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = _ROOT / 'scalerl_jax'

# The longest prefix counts, so that a folder may span layers.
_LAYERS = {
  'records': 0,
  'arrays': 0,
  'losses': 1,
  'advantages': 1,
  'aggregation': 1,
  'filters': 1,
  'curriculum': 1,
  'length_control': 1,
  'curves': 1,
  'models': 2,
  'sharding': 2,
  'generation.sampling': 2,
  'recipes': 3,
  'generation.decode': 3,
  'training': 3,
  'reporting.compute': 3,
  'training.checkpointing': 4,
  'data': 4,
  'rewards': 4,
  'generation': 4,
  'evaluation': 4,
  'hf': 4,
  'logs': 4,
  'reporting': 4,
  'pipeline': 5,
  'compilation': 6,
  'config': 6,
  'build': 6,
}
# Namespaces: importing a module of theirs runs nothing.
_NAMESPACES = (
  '',
  'generation',
  'generation.sglang',
  'reporting',
  'pipeline',
)
# Layer 4 knows its neighbours, and layer 5 knows it, through these alone.
_PROTOCOLS = ('generation.engine', 'data.tokenizer')
# Neighbours that are known all the same.
_EXCEPTIONS = {
  ('data.problems', 'rewards.verifiers'),  # Answers are parsed when read.
}
_OUTSIDE_WORLD = {
  'asyncio',
  'datetime',
  'glob',
  'http',
  'io',
  'logging',
  'multiprocessing',
  'os',
  'pathlib',
  'random',
  'requests',
  'shutil',
  'socket',
  'subprocess',
  'sys',
  'tempfile',
  'threading',
  'time',
  'urllib',
  'warnings',
}
_LIBRARIES = {
  0: {'numpy', 'jax', 'jaxtyping'},
  1: {'numpy', 'jax', 'jaxtyping', 'scipy'},
  2: {'numpy', 'jax', 'jaxtyping', 'flax'},
  3: {'numpy', 'jax', 'jaxtyping', 'flax', 'optax'},
}
_HEAVY = ('flax', 'optax', 'orbax', 'torch', 'sglang', 'matplotlib')


def _name(path: pathlib.Path) -> str:
  parts = path.relative_to(_PACKAGE).with_suffix('').parts
  return '.'.join(p for p in parts if p != '__init__')


_MODULES = {_name(path): path for path in sorted(_PACKAGE.rglob('*.py'))}


def _layer(module: str) -> int:
  parts = module.split('.')
  for n in range(len(parts), 0, -1):
    if (layer := _LAYERS.get('.'.join(parts[:n]))) is not None:
      return layer
  raise AssertionError(f'{module} has no layer; add it to the table')


def _imports(module: str) -> set[str]:
  """Full names of all modules imported, also inside functions."""
  names: set[str] = set()
  for node in ast.walk(ast.parse(_MODULES[module].read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{module} has a relative import'
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        inside = full.removeprefix('scalerl_jax.') in _MODULES
        names.add(full if inside else str(node.module))
  return names


def _own(module: str) -> set[str]:
  """Modules of the package that it imports, without the package's name."""
  prefix = 'scalerl_jax.'
  return {
    name.removeprefix(prefix)
    for name in _imports(module)
    if name.startswith(prefix)
  }


def _calls(module: str) -> set[str]:
  """Dotted names of what is called, as written."""
  tree = ast.parse(_MODULES[module].read_text())
  return {
    ast.unparse(node.func)
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
  }


_LAYERED = [m for m in _MODULES if m not in _NAMESPACES]
_PURE = [m for m in _LAYERED if _layer(m) <= 3]


def test_walk_finds_the_package():
  assert len(_LAYERED) > 50
  assert len(_PURE) > 30
  assert 'losses.policy' in _own('losses')
  assert _layer('generation.decode') < _layer('generation.jax_engine')


def test_every_folder_is_a_package():
  """Else the installed package would lack it."""
  for path in _MODULES.values():
    assert (path.parent / '__init__.py').is_file()


@pytest.mark.parametrize('module', _NAMESPACES)
def test_namespace_imports_nothing(module):
  assert not _imports(module)


@pytest.mark.parametrize('module', _LAYERED)
def test_imports_go_downwards(module):
  layer, folder = _layer(module), module.split('.')[0]
  for name in _own(module):
    if name.split('.')[0] == folder or (module, name) in _EXCEPTIONS:
      allowed = layer
    elif layer == 4 and name not in _PROTOCOLS:
      allowed = 3  # Neighbours that do I/O do not know one another.
    else:
      allowed = layer
    assert _layer(name) <= allowed, f'{module} imports {name}'


def test_no_module_imports_itself_in_a_circle():
  done: set[str] = set()

  def visit(module, path):
    assert module not in path, ' -> '.join([*path, module])
    if module not in done:
      for name in _own(module) & set(_MODULES):
        visit(name, [*path, module])
      done.add(module)

  for module in _MODULES:
    visit(module, [])


@pytest.mark.parametrize(
  'module', [m for m in _LAYERED if m.startswith('pipeline')]
)
def test_pipeline_imports_no_concrete_engine_verifier_or_writer(module):
  for name in _own(module):
    assert (
      _layer(name) <= 3 or name in _PROTOCOLS or name.startswith('pipeline')
    ), f'{module} imports {name}'


@pytest.mark.parametrize('module', _PURE)
def test_pure_layers_import_no_outside_world(module):
  roots = {name.split('.')[0] for name in _imports(module)}
  assert not roots & _OUTSIDE_WORLD
  libraries = roots - set(sys.stdlib_module_names) - {'scalerl_jax'}
  assert libraries <= _LIBRARIES[_layer(module)]


@pytest.mark.parametrize('module', _PURE)
def test_pure_layers_create_no_key_and_open_no_file(module):
  for call in _calls(module):
    assert call not in ('open', 'print', 'input', 'jax.random.key')
    assert not call.startswith(('np.random.', 'numpy.random.'))
    assert not call.endswith('PRNGKey')


@pytest.mark.parametrize(
  'statement',
  ['import scalerl_jax', 'from scalerl_jax import losses, curves'],
)
def test_light_imports_stay_light(statement):
  code = (
    f'{statement}\nimport sys\nprint(sorted(set(sys.modules) & set({_HEAVY})))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.stdout == '[]\n', done.stderr
