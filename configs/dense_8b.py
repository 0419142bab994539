"""The 8B run of the ScaleRL paper (arXiv:2510.13786), sizes of Llama 3.1 8B.

    python launch/run.py --config=configs/dense_8b.py --config.model.path=DIR \
        --config.data.train_path=TRAIN.jsonl --config.data.eval_path=EVAL.jsonl

DIR is a checkpoint in the layout of Hugging Face with its tokenizer: in the
paper one that was fine-tuned on reasoning traces. The problems are Polaris-53K,
1,000 of them held out. Without paths the weights are drawn and the problems are
the toy's, which is of use for `--dry_run` only.

Hardware: the mesh is for 16 trainers. The paper's job has 80 GB200, of which 64
generate; it gives GPU-hours of all 80.

Variants (`--config=configs/dense_8b.py:NAME`), with the paper's fits and what
follows from the spacing of its points (GPU-hours of an update):

    14k (default)  12k tokens of thinking   A .610  B 1.92  C_mid 2,542
                   2.6 per update; 6,200 updates are 16,000 GPU-hours
    32k            32k tokens of thinking   A .645  B 1.89  C_mid 11,272
                   10.7 per update; 4,000 updates are 42,700 GPU-hours

Not in the paper, and chosen here: the clip of the gradient, the decays of the
moments, the temperature, the cap of the ratio among 4, 5 and 8, and the budgets
of thinking of 32k.

What was run: `--dry_run` alone, docs/plan.md has the figures. No update of it
was ever computed. The run starts its servers on its own host; for those of
other hosts give engine.start_servers=False, engine.sglang.addresses and
weights_dir: docs/sglang.md. Trainers on several hosts: docs/cluster.md.
"""

import ml_collections

_DEVICES = 16
_PROMPT_TOKENS = 2_048
_ANSWER_TOKENS = 2_048
_VARIANTS = {
  '14k': {
    'num_updates': 6_200,
    'max_tokens': _PROMPT_TOKENS + 12_288 + _ANSWER_TOKENS,
    'min_thinking_tokens': 10_000,
    'max_thinking_tokens': 12_000,
  },
  '32k': {
    'num_updates': 4_000,
    'max_tokens': _PROMPT_TOKENS + 32_768 + _ANSWER_TOKENS,
    'min_thinking_tokens': 30_000,
    'max_thinking_tokens': 32_000,
  },
}


def get_config(variant: str = '14k') -> ml_collections.ConfigDict:
  """Returns the configuration of a variant.

  Args:
    variant: `14k` or `32k`.

  Returns:
    The configuration.

  Raises:
    ValueError: The variant is unknown.
  """
  if variant not in _VARIANTS:
    raise ValueError(f'variant {variant!r} must be one of {list(_VARIANTS)}')
  sizes = _VARIANTS[variant]
  return ml_collections.ConfigDict(
    {
      'seed': 0,
      'num_updates': sizes['num_updates'],
      'recipe': 'scalerl',
      'recipe_args': {'max_ratio': 5.0},
      'model': {
        'path': '',
        'vocab_size': 128_256,
        'num_layers': 32,
        'model_dim': 4_096,
        'num_heads': 32,
        'num_kv_heads': 8,
        'head_dim': 128,
        'hidden_dim': 14_336,
        'rope_theta': 500_000.0,
        'rope_scaling': {
          'kind': 'llama3',
          'factor': 8.0,
          'low_frequency_factor': 1.0,
          'high_frequency_factor': 4.0,
          'original_max_positions': 8_192,
        },
        'norm_eps': 1e-5,
        'tied_head': False,
        'dtype': 'bfloat16',
        'remat': 'full',
      },
      'data': {
        'train_path': '',
        'eval_path': '',
        'tokenizer': '',
        'max_prompt_tokens': _PROMPT_TOKENS,
        'toy': {'num_train': 2_048, 'num_eval': 1_000},
      },
      'batch': {
        'prompts': 48,
        'group_size': 16,
        'num_microbatches': 768 // _DEVICES,  # A row a device.
        'max_tokens': sizes['max_tokens'],
        'truncated': 'mask',
        'packed': False,
      },
      'engine': {
        'kind': 'sglang',
        'num_slots': 96,  # Of each server: all rollouts of an update together.
        'temperature': 1.0,
        'start_servers': True,
        'sglang': {
          'num_servers': 8,
          'addresses': (),
          'python': '',
          'args': (),
          'weights_dir': '',
          'weights_dtype': 'bfloat16',
        },
      },
      'length': {
        'interrupt': True,
        'min_thinking_tokens': sizes['min_thinking_tokens'],
        'max_thinking_tokens': sizes['max_thinking_tokens'],
        'answer_tokens': _ANSWER_TOKENS,
        'phrase': (
          'Okay, time is up. Let me stop thinking and formulate a final answer'
          ' now. </think>'
        ),
      },
      'pipeline': {
        'schedule': 'threads',
        'algorithm': 'pipeline_rl',
        'max_lag': 8,
        'deadline_s': 3_600.0,
      },
      'curriculum': {'max_pass_rate': 0.9},
      'optimizer': {
        'learning_rate': 5e-7,
        'warmup_steps': 100,
        'b1': 0.9,
        'b2': 0.95,
        'eps': 1e-15,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
      },
      'evaluation': {
        'every': 100,
        'samples_per_problem': 16,
        'num_problems': 1_000,
      },
      'checkpoint': {'every': 100, 'keep': 2},
      'curve': {'compute_axis': 'device_hours', 'min_compute': 1_500.0},
      'mesh': {'data': 1, 'fsdp': _DEVICES, 'tensor': 1, 'expert': 1},
    }
  )
