"""The cache of compiled programs."""

import jax
import pytest

from scalerl_jax import compilation


@pytest.fixture(autouse=True)
def _settings_of_jax():
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update('jax_compilation_cache_dir', None)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def test_cache_is_below_the_users_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  compilation.use_cache(min_seconds=0.5)
  assert jax.config.jax_compilation_cache_dir == str(
    tmp_path / 'scalerl_jax' / 'compilation'
  )
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5


def test_choice_of_the_user_is_left_alone(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  jax.config.update('jax_compilation_cache_dir', '/elsewhere')
  compilation.use_cache()
  assert jax.config.jax_compilation_cache_dir == '/elsewhere'
  assert not any(tmp_path.iterdir())


def test_no_cache_where_nothing_can_be_written(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  compilation.use_cache()
  assert jax.config.jax_compilation_cache_dir is None
