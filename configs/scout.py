"""Llama-4 Scout, 17B active of 109B parameters, 16 experts.

    python launch/run.py --config=configs/scout.py --config.model.path=DIR \
        --config.data.train_path=TRAIN.jsonl --config.data.eval_path=EVAL.jsonl

DIR is a checkpoint in the layout of Hugging Face with its tokenizer; of one
that reads images too, the text is loaded. The problems are Polaris-53K, 1,000
of them held out. Without paths the weights are drawn and the problems are the
toy's, which is of use for `--dry_run` only.

Hardware: the mesh is for 64 trainers; variant `256` is for 256. The paper's job
has 80 GB200, of which 64 generate; it gives GPU-hours of all 80.

Expected, from the paper: A .710, B 1.65, from a pass rate of .512; C_mid is
4,242 in its table, but the curve that it draws needs 6,900. About 6.2 GPU-hours
an update; 7,100 updates are 44,000.

Not in the paper, and chosen here: the learning rate and all that
configs/dense_8b.py chooses, and the mesh.

What was run: `--dry_run` alone, docs/plan.md has the figures. No update of it
was ever computed. The run starts its servers on its own host; for those of
other hosts give engine.start_servers=False, engine.sglang.addresses and
weights_dir: docs/sglang.md. Trainers on several hosts: docs/cluster.md.
"""

import ml_collections

_MESHES = {
  '64': {'data': 1, 'fsdp': 16, 'tensor': 1, 'expert': 4},
  '256': {'data': 1, 'fsdp': 64, 'tensor': 1, 'expert': 4},
}
_PROMPT_TOKENS = 2_048
_ANSWER_TOKENS = 2_048


def get_config(variant: str = '64') -> ml_collections.ConfigDict:
  """Returns the configuration for a number of trainers.

  Args:
    variant: `64` or `256`.

  Returns:
    The configuration.

  Raises:
    ValueError: The variant is unknown.
  """
  if variant not in _MESHES:
    raise ValueError(f'variant {variant!r} must be one of {list(_MESHES)}')
  return ml_collections.ConfigDict(
    {
      'seed': 0,
      'num_updates': 7_100,
      'recipe': 'scalerl',
      'recipe_args': {'max_ratio': 5.0},
      'model': {
        'path': '',
        'vocab_size': 202_048,
        'num_layers': 48,
        'model_dim': 5_120,
        'num_heads': 40,
        'num_kv_heads': 8,
        'head_dim': 128,
        'hidden_dim': 16_384,
        'rope_theta': 500_000.0,
        'rope_scaling': {
          'kind': 'llama3',
          'factor': 16.0,
          'low_frequency_factor': 1.0,
          'high_frequency_factor': 1.0,
          'original_max_positions': 8_192,
        },
        'norm_eps': 1e-5,
        'tied_head': False,
        'moe': {
          'num_experts': 16,
          'experts_per_token': 1,
          'expert_dim': 8_192,
          'router': 'sigmoid',
          'shared_dim': 8_192,
        },
        'local_attention': {
          'chunk_tokens': 8_192,
          'global_every': 4,
          'qk_norm': True,
          'scale': 0.1,
          'floor_tokens': 8_192,
        },
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
        'num_microbatches': 768 // int(variant),  # A row a device.
        'max_tokens': _PROMPT_TOKENS + 12_288 + _ANSWER_TOKENS,
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
          'args': ('--tp-size', '8'),
          'weights_dir': '',
          'weights_dtype': 'bfloat16',
        },
      },
      'length': {
        'interrupt': True,
        'min_thinking_tokens': 10_000,
        'max_thinking_tokens': 12_000,
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
      'mesh': _MESHES[variant],
    }
  )
