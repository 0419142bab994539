"""Strict settings for the whole suite: every test runs under them."""

from jaxtyping import install_import_hook

# Before anything imports the package, so that every signature is checked.
install_import_hook('scalerl_jax', 'beartype.beartype')

import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
