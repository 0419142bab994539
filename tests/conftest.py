"""Strict settings for the whole suite: every test runs under them."""

import os
import pathlib
import signal

from jaxtyping import install_import_hook

# Before anything imports the package, so that every signature is checked.
install_import_hook('scalerl_jax', 'beartype.beartype')

# A shell ignores Ctrl-C for what it runs in the background, and so would tests
# and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

import jaxtyping  # noqa: E402
import pytest  # noqa: E402

from scalerl_jax.generation.sglang import installation  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # Before it is looked at.
def pytest_collection_modifyitems(config, items):
  """With `-n 2`: a module, or all that needs servers, stays in one process."""
  if not config.pluginmanager.hasplugin('xdist'):
    return
  for item in items:
    group = item.nodeid.partition('::')[0]
    needs_servers = 'sglang_python' in item.fixturenames
    if needs_servers or group.startswith('tests/generation/sglang/'):
      group = 'servers'
    item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def strict_dtypes():
  """No implicit promotion between dtypes; for our own pure functions."""
  with jax.numpy_dtype_promotion('strict'):
    yield


@pytest.fixture
def unchecked_signatures():
  """As a user runs the package: without the checks of annotations."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


@pytest.fixture(scope='module')
def quick_compilation():
  """For modules whose programs take far longer to compile than to run."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
  # Else other modules would run them, with sums in another order.
  jax.clear_caches()


@pytest.fixture(scope='session')
def sglang_python():
  """Interpreter of an environment with SGLang; without one, tests skip."""
  given = os.environ.get('SCALERL_SGLANG_PYTHON')
  here = pathlib.Path(__file__).parents[1] / '.sglang'
  if not given and not installation.is_finished(here):
    pytest.skip(
      'NOT RUN, no SGLang server: python launch/serve.py --install_cpu=.sglang'
      ' makes one, or SCALERL_SGLANG_PYTHON names the python of another'
    )
  return given or str(here / 'bin' / 'python')
