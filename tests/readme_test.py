"""What the README says is so."""

import doctest
import pathlib
import re
import runpy
import subprocess

import ml_collections
import pytest

from scalerl_jax import config as config_lib

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = (_ROOT / 'README.md').read_text(encoding='utf-8')
_PAGES = ('README.md', 'docs/curves.md')


def _blocks(language: str, text: str = _TEXT) -> list[str]:
  # All languages first: a fence that closes one block opens no other.
  found = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.M | re.S)
  return [block for name, block in found if name == language]


def _files() -> list[str]:
  """Files of the project; what git ignores is none."""
  done = subprocess.run(
    ['git', 'ls-files', '--cached', '--others', '--exclude-standard'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=30,
    check=False,
  )
  if done.returncode:  # Not a git checkout.
    found = (p for p in _ROOT.rglob('*') if '__pycache__' not in p.parts)
    return [p.relative_to(_ROOT).as_posix() for p in found if p.is_file()]
  return [name for name in done.stdout.splitlines() if (_ROOT / name).exists()]


def _tree() -> list[str]:
  """Paths of the block that starts with the package, folders with a slash."""
  (block,) = (b for b in _blocks('') if b.startswith('scalerl_jax/\n'))
  paths, folder = [], ''
  for line in block.splitlines():
    name = line.split()[0]
    if not line.startswith(' '):
      folder = name if line == name else ''
    paths.append(folder + name if line.startswith(' ') else name)
  return paths


def _python_entries(folder: str) -> set[str]:
  """Python files of a folder, and its folders that contain any."""
  below = [f for f in _files() if f.startswith(folder) and f.endswith('.py')]
  entries = set()
  for name in below:
    first, slash, _ = name.removeprefix(folder).partition('/')
    entries.add(folder + first + slash)
  return entries - {f'{folder}__init__.py'}


def test_tree_lists_the_package_exactly():
  listed = [p for p in _tree() if p.startswith('scalerl_jax/')]
  assert len(set(listed)) == len(listed)
  assert set(listed) - {'scalerl_jax/'} == _python_entries('scalerl_jax/')


def test_tree_lists_every_folder_with_code():
  listed = _tree()
  assert {p.split('/')[0] + '/' for p in listed} >= _python_entries('')
  for path in listed:
    assert (_ROOT / path).is_dir() == path.endswith('/')
    assert (_ROOT / path).exists()


def test_local_links_lead_somewhere():
  links = re.findall(r'\]\((?!https?:)([^)#]+)', _TEXT)
  assert links
  for link in links:
    assert (_ROOT / link).is_file(), link


@pytest.mark.parametrize('page', _PAGES)
def test_python_blocks_do_as_shown(page, monkeypatch):
  monkeypatch.chdir(_ROOT)
  blocks = _blocks('python', (_ROOT / page).read_text(encoding='utf-8'))
  assert blocks
  names: dict[str, object] = {}
  output: list[str] = []
  for i, block in enumerate(blocks):
    test = doctest.DocTestParser().get_doctest(
      block, names, f'{page} block {i}', page, 0
    )
    assert test.examples
    doctest.DocTestRunner(verbose=False).run(
      test, out=output.append, clear_globs=False
    )
    names = test.globs
  assert not output, ''.join(output)


_COMMANDS = re.findall(r'python launch/run\.py (.*)$', _TEXT, re.M)


def test_there_are_commands():
  assert len(_COMMANDS) > 1


@pytest.mark.parametrize('command', _COMMANDS)
def test_command_is_of_fields_that_exist(command):
  (path, variant), *_ = re.findall(r'--config=([\w/.]+):?(\w*)', command)
  get_config = runpy.run_path(str(_ROOT / path))['get_config']
  config = get_config(variant) if variant else get_config()
  assert isinstance(config, ml_collections.ConfigDict)
  for field, value in re.findall(r'--config\.([\w.]+)=(\S+)', command):
    config.update_from_flattened_dict({field: _type_of(config, field)(value)})
  config_lib.from_config_dict(config)


def _type_of(config, field):
  for name in field.split('.'):
    config = config[name]
  return type(config)


def test_test_command_is_found_by_the_ci_script():
  block = _TEXT.partition('<!-- test-command -->\n')[2]
  assert re.match(
    r'```sh\n\S.* && python -m pytest -n 2 --dist loadgroup\n```\n', block
  )
  assert '<!-- test-command -->' in (_ROOT / '.ci' / 'run').read_text()
