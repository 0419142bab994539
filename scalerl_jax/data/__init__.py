"""Problems, tokens, and the order in which problems are visited."""

from scalerl_jax.data.hf_tokenizer import HfTokenizer as HfTokenizer
from scalerl_jax.data.hf_tokenizer import TokenizerError as TokenizerError
from scalerl_jax.data.problems import DataError as DataError
from scalerl_jax.data.problems import check_disjoint as check_disjoint
from scalerl_jax.data.problems import fingerprint as fingerprint
from scalerl_jax.data.problems import read_problems as read_problems
from scalerl_jax.data.sampler import PromptSampler as PromptSampler
from scalerl_jax.data.tokenizer import ByteTokenizer as ByteTokenizer
from scalerl_jax.data.tokenizer import Tokenizer as Tokenizer

__all__ = (
  'ByteTokenizer',
  'DataError',
  'HfTokenizer',
  'PromptSampler',
  'Tokenizer',
  'TokenizerError',
  'check_disjoint',
  'fingerprint',
  'read_problems',
)
