"""The toy run: a 0.3 M-parameter policy learns chains of digit arithmetic.

    python launch/run.py --config=configs/toy.py

Hardware: a laptop CPU with two cores; about 8 minutes, warm start included.
Expected: a pass rate from 0.2 to about 0.86; docs/toy.md has the figures.

Variants (`--config=configs/toy.py:NAME`): scalerl (default), grpo, dapo,
magistral, minimax_m1, dr_grpo, gspo. They differ from one another in the
recipe, and in the schedule where the algorithm has its own.
"""

import ml_collections

_MAX_PROMPT_TOKENS = 16
_MAX_RESPONSE_TOKENS = 56

_RECIPE_ARGS = {
  'scalerl': {'max_ratio': 5.0},
  'grpo': {'clip': 0.2},
  'dapo': {'clip_low': 0.2, 'clip_high': 0.26},
  'magistral': {'clip_low': 0.2, 'clip_high': 0.26},
  'minimax_m1': {'max_ratio': 5.0},
  'dr_grpo': {'clip': 0.2, 'length': _MAX_RESPONSE_TOKENS},
  'gspo': {'clip_low': 3e-3, 'clip_high': 4e-3},
}
# The paper runs these with PPO-off-policy.
_OFF_POLICY = ('grpo', 'dapo', 'minimax_m1', 'dr_grpo')


def get_config(variant: str = 'scalerl') -> ml_collections.ConfigDict:
  """Returns the configuration of a variant.

  Args:
    variant: Name of a recipe.

  Returns:
    The configuration.

  Raises:
    ValueError: The variant is unknown.
  """
  if variant not in _RECIPE_ARGS:
    raise ValueError(f'variant {variant!r} must be one of {list(_RECIPE_ARGS)}')
  off_policy = variant in _OFF_POLICY
  return ml_collections.ConfigDict(
    {
      'seed': 0,
      'num_updates': 120,
      'recipe': variant,
      'recipe_args': _RECIPE_ARGS[variant],
      'model': {
        'num_layers': 2,
        'model_dim': 128,
        'num_heads': 4,
        'num_kv_heads': 2,
        'head_dim': 32,
        'hidden_dim': 256,
        'qk_norm': True,
      },
      'data': {
        'train_path': '',
        'eval_path': '',
        'max_prompt_tokens': _MAX_PROMPT_TOKENS,
        'toy': {
          'num_train': 2048,
          'num_eval': 100,
          'min_operations': 2,
          'max_operations': 7,
          'seed': 0,
        },
      },
      'warm_start': {
        'num_steps': 800,
        'batch_size': 40,
        'learning_rate': 4e-3,
        'interrupted_fraction': 0.1,
        'error_rate': 0.4,
        'clean_steps': 480,
      },
      'batch': {
        'prompts': 32,
        'group_size': 16,
        'num_microbatches': 16,
        'max_tokens': 128,
        'packed': True,
        'truncated': 'keep',
      },
      'engine': {
        'kind': 'jax',
        'num_slots': 512,
        'steps_per_dispatch': 8,
        'temperature': 1.0,
      },
      'length': {
        'interrupt': True,
        'min_thinking_tokens': 36,
        'max_thinking_tokens': 46,
        'answer_tokens': 4,
        'phrase': 'Stop.</think>',
      },
      'pipeline': {
        'schedule': 'lockstep',
        'algorithm': 'ppo_off_policy' if off_policy else 'pipeline_rl',
        'max_lag': 8,
        'lockstep_lead': 0 if off_policy else 2,
        'deadline_s': 600.0,
      },
      'curriculum': {'max_pass_rate': 0.9},
      'optimizer': {
        'learning_rate': 1.2e-4,
        'warmup_steps': 10,
        'b1': 0.9,
        'b2': 0.95,
        'eps': 1e-15,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
        'max_nonfinite_streak': 5,
      },
      'evaluation': {
        'every': 4,
        'samples_per_problem': 16,
        'num_problems': 100,
      },
      'checkpoint': {'every': 8, 'keep': 2},
      'curve': {
        'compute_axis': 'flops',
        'forecast_multiple': 2.0,
        'min_compute': 0.0,
      },
      'mesh': {'data': 1, 'fsdp': 1, 'tensor': 1, 'expert': 1},
      'reporting': {'plots': True, 'tensorboard': True, 'num_samples': 8},
    }
  )
