"""The small layers of a transformer block."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from scalerl_jax.models import spec as spec_lib


def rms_norm(
  x: Float[Array, '*B D'], scale: Float[Array, ' D'] | None, *, eps: float
) -> Float[Array, '*B D']:
  """Scales each vector to unit root mean square, in float32.

      y = scale · x / √(mean(x²) + ε)

  See "Root Mean Square Layer Normalization" (arXiv:1910.07467), Eq. 4.

  Args:
    x: Activations.
    scale: Learned gain of each channel; None: 1.
    eps: ε, keeps the root away from 0.

  Returns:
    Normalized activations in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  y = x32 * jax.lax.rsqrt(mean_square + eps)
  if scale is not None:
    y *= jnp.reshape(scale, (1,) * (x.ndim - 1) + (-1,))
  return y.astype(x.dtype)


def rope_frequencies(
  *, head_dim: int, theta: float, scaling: spec_lib.RopeScaling | None = None
) -> Float[Array, ' H2']:
  """Computes the angle by which each channel pair turns per token.

      f(i) = θ^(-2i / H),   i in [0, H/2),   lowered as `RopeScaling` says

  See "RoFormer" (arXiv:2104.09864), Eq. 15.

  Args:
    head_dim: H.
    theta: θ, the base.
    scaling: How the frequencies are lowered; None: not at all.

  Returns:
    Radians, float32.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  if scaling is None:
    return frequencies
  lowered = frequencies / scaling.factor
  if scaling.kind == 'linear':
    return lowered
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  turns = scaling.original_max_positions * frequencies / (2 * jnp.pi)
  # Equal factors leave nothing between kept and lowered.
  kept = jnp.where(turns > high, 1.0, 0.0)
  if high > low:
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return (1 - kept) * lowered + kept * frequencies


def rope_tables(
  positions: Int[Array, 'B T'], frequencies: Float[Array, ' H2']
) -> tuple[Float[Array, 'B T H2'], Float[Array, 'B T H2']]:
  """Computes the cosines and sines that `rope` rotates by.

      angle(p, i) = p · f(i)

  Args:
    positions: Position of each token in its own sequence, from 0.
    frequencies: From `rope_frequencies`.

  Returns:
    (cos, sin), float32.
  """
  angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None, :]
  return jnp.cos(angles), jnp.sin(angles)


def rope(
  x: Float[Array, 'B T N H'],
  cos: Float[Array, 'B T H2'],
  sin: Float[Array, 'B T H2'],
) -> Float[Array, 'B T N H']:
  """Rotates channel pairs (i, i + H/2) of each head by the position's angle.

  Args:
    x: Queries or keys.
    cos: From `rope_tables`.
    sin: From `rope_tables`.

  Returns:
    Rotated array, in the dtype of `x`.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None, :], sin[:, :, None, :]
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def swiglu(
  x: Float[Array, 'B T D'],
  gate: Float[Array, 'D F'],
  up: Float[Array, 'D F'],
  down: Float[Array, 'F D'],
) -> Float[Array, 'B T D']:
  """Applies the gated feed-forward layer: (silu(x·gate) ⊙ x·up)·down.

  See "GLU Variants Improve Transformer" (arXiv:2002.05202), Eq. 6.

  Args:
    x: Activations.
    gate: Projection whose SiLU gates.
    up: Projection that is gated.
    down: Projection back to the model width.

  Returns:
    Array of the shape of `x`.
  """
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down
