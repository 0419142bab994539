"""A cache of compiled programs on disk, so that a second start is quick."""

import os
import pathlib

import jax


def use_cache(*, min_seconds: float = 1.0) -> None:
  """Keeps compiled programs in `$XDG_CACHE_HOME/scalerl_jax/compilation`.

  A cache that is chosen by JAX's own settings is left as it is, and so is
  a directory that cannot be written.

  Args:
    min_seconds: Programs that compile faster are not kept.
  """
  if jax.config.values['jax_compilation_cache_dir'] is not None:
    return
  root = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  path = pathlib.Path(root) / 'scalerl_jax' / 'compilation'
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError:
    return
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', min_seconds)
