"""Losses per token, KL estimators, and log-probs in bounded memory."""

from scalerl_jax.losses.divergence import kl_k1 as kl_k1
from scalerl_jax.losses.divergence import kl_k2 as kl_k2
from scalerl_jax.losses.divergence import kl_k3 as kl_k3
from scalerl_jax.losses.logps import fused_loss as fused_loss
from scalerl_jax.losses.logps import token_logps as token_logps
from scalerl_jax.losses.policy import cispo as cispo
from scalerl_jax.losses.policy import clipped_surrogate as clipped_surrogate
from scalerl_jax.losses.policy import gspo as gspo
from scalerl_jax.losses.policy import reinforce as reinforce

__all__ = (
  'cispo',
  'clipped_surrogate',
  'fused_loss',
  'gspo',
  'kl_k1',
  'kl_k2',
  'kl_k3',
  'reinforce',
  'token_logps',
)
