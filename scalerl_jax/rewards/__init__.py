"""Verifiable rewards."""

from scalerl_jax.rewards.grading import grade as grade
from scalerl_jax.rewards.verifiers import VERIFIERS as VERIFIERS
from scalerl_jax.rewards.verifiers import Verifier as Verifier

__all__ = ('VERIFIERS', 'Verifier', 'grade')
