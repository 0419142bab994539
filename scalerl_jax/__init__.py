"""Predictable reinforcement-learning post-training of language models in JAX.

The package is imported by its parts (`from scalerl_jax import losses, curves`);
importing it loads nothing heavy.
"""

__version__ = '0.1.0'
