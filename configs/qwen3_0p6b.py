"""Qwen3-0.6B on one accelerator: the whole recipe with a policy that thinks.

    python launch/run.py --config=configs/qwen3_0p6b.py \
        --config.model.path=DIR --config.data.chat=True \
        --config.data.train_path=TRAIN.jsonl --config.data.eval_path=EVAL.jsonl

DIR is a checkpoint in the layout of Hugging Face with its tokenizer. Problems
should be ones that it solves sometimes: grade-school mathematics, for example.
Without paths the weights are drawn and the problems are the toy's, which is of
use for `--dry_run` only.

Hardware: one device of 80 GB, generation and training in turn; more with
`--config.mesh.fsdp=N`. Expected: unknown; the paper has no run of this size.

What was run: `--dry_run` alone, docs/plan.md has the figures. No update of it
was ever computed, and the lengths, the batch and the learning rate are guesses
to begin with.
"""

import ml_collections

_PROMPT_TOKENS = 512
_ANSWER_TOKENS = 512


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration."""
  return ml_collections.ConfigDict(
    {
      'seed': 0,
      'num_updates': 400,
      'recipe': 'scalerl',
      'recipe_args': {'max_ratio': 5.0},
      'model': {
        'path': '',
        'vocab_size': 151_936,
        'num_layers': 28,
        'model_dim': 1_024,
        'num_heads': 16,
        'num_kv_heads': 8,
        'head_dim': 128,
        'hidden_dim': 3_072,
        'rope_theta': 1e6,
        'norm_eps': 1e-6,
        'tied_head': True,
        'qk_norm': True,
        'dtype': 'bfloat16',
        'remat': 'full',
      },
      'data': {
        'train_path': '',
        'eval_path': '',
        'tokenizer': '',
        'chat': False,
        'max_prompt_tokens': _PROMPT_TOKENS,
        'toy': {'num_train': 2_048, 'num_eval': 200},
      },
      'batch': {
        'prompts': 16,
        'group_size': 8,
        'num_microbatches': 16,
        'max_tokens': 4_096,
        'packed': True,
        'truncated': 'mask',
      },
      'engine': {'kind': 'jax', 'num_slots': 128, 'temperature': 1.0},
      'length': {
        'interrupt': True,
        'min_thinking_tokens': 2_000,
        'max_thinking_tokens': 2_900,
        'answer_tokens': _ANSWER_TOKENS,
        'phrase': (
          'Okay, time is up. Let me stop thinking and formulate a final answer'
          ' now. </think>'
        ),
      },
      'pipeline': {
        'schedule': 'lockstep',
        'algorithm': 'pipeline_rl',
        'max_lag': 8,
        'lockstep_lead': 2,
        'deadline_s': 3_600.0,
      },
      'curriculum': {'max_pass_rate': 0.9},
      'optimizer': {
        'learning_rate': 1e-6,
        'warmup_steps': 10,
        'b1': 0.9,
        'b2': 0.95,
        'eps': 1e-15,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
      },
      'evaluation': {
        'every': 20,
        'samples_per_problem': 8,
        'num_problems': 200,
      },
      'checkpoint': {'every': 20, 'keep': 2},
      'curve': {'compute_axis': 'device_hours'},
      'mesh': {'data': 1, 'fsdp': 1, 'tensor': 1, 'expert': 1},
    }
  )
