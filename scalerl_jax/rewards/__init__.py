"""Verifiable rewards."""

from scalerl_jax.rewards.grading import grade as grade
from scalerl_jax.rewards.verifiers import Verifier as Verifier
from scalerl_jax.rewards.verifiers import VERIFIERS as VERIFIERS

__all__ = ('VERIFIERS', 'Verifier', 'grade')
