import json
import logging
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import length_control
from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.build import workdir as workdir_lib
from scalerl_jax.generation import decode
from scalerl_jax.generation import jax_engine
from scalerl_jax.training import checkpointing
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib
from tests import tiny
from tests import tiny_checkpoint

_TOKENIZER = data.ByteTokenizer()


@pytest.fixture(scope='module', autouse=True)
def _compiled_once(tmp_path_factory):
  with tiny.compiled_once(tmp_path_factory.mktemp('compiled')):
    yield


@pytest.fixture(scope='module')
def reference(tmp_path_factory, _compiled_once):
  """Directory of a run that nothing disturbed; read only."""
  workdir = tmp_path_factory.mktemp('reference')
  build.run(tiny.config(), workdir)
  return workdir


@pytest.fixture
def workdir(reference, tmp_path):
  """A new directory that starts from the same base policy."""
  shutil.copytree(reference / 'warm_start', tmp_path / 'run' / 'warm_start')
  return tmp_path / 'run'


def _spec(config):
  return config.model.spec(vocab_size=_TOKENIZER.vocab_size)


def _restore(config, workdir):
  params = models.init_params(_spec(config), jax.random.key(0))
  state = state_lib.init(params, optimizer.make_optimizer(config.optimizer))
  checkpointer = checkpointing.Checkpointer(workdir / 'checkpoints', keep=2)
  restored = checkpointer.restore(state)
  checkpointer.close()
  return restored


def _leaves(tree):
  """Leaves as (path, comparable value), without the compute meters' times."""
  return {
    jax.tree_util.keystr(path): (
      np.asarray(leaf).tobytes() if hasattr(leaf, 'dtype') else leaf
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if 'seconds' not in jax.tree_util.keystr(path)
    and 'offsets' not in jax.tree_util.keystr(path)
    and 'device_hours' not in jax.tree_util.keystr(path)
  }


def _assert_same_run(config, one, other):
  """Asserts equality, to the bit, of all but what measures time."""
  for name in ('evals', 'metrics', 'samples'):
    assert tiny.rows(one, name) == tiny.rows(other, name)
  a, b = _restore(config, one), _restore(config, other)
  assert a.updates == b.updates
  assert _leaves(a.train_state) == _leaves(b.train_state)
  assert _leaves(a.host) == _leaves(b.host)


def test_k06_training_and_evaluation_share_one_template(tmp_path, monkeypatch):
  path = tiny_checkpoint.write_tokenizer(tmp_path / 'tokenizer')
  config = tiny.config(
    num_updates=1,
    data={'tokenizer': str(path), 'chat': True, 'max_prompt_tokens': 64},
    warm_start={'num_steps': 0},
    batch={'max_tokens': 104},
  )
  asked = {}
  submit = jax_engine.JaxEngine.submit

  def record(self, request):
    asked[request.problem_id] = request.prompt_ids.tolist()
    submit(self, request)

  monkeypatch.setattr(jax_engine.JaxEngine, 'submit', record)
  build.run(config, tmp_path / 'run')
  tokenizer = data.HfTokenizer(path, chat=True)
  splits = workdir_lib.read_problems(config, tmp_path / 'run', tokenizer)
  for problems in splits:
    found = [p for p in problems if p.problem_id in asked]
    assert found
    for problem in found:
      text = tokenizer.decode(asked.pop(problem.problem_id))
      # Its end of a turn is a stop token, which decoding leaves out.
      assert text == (
        f'<|im_start|>user\n{problem.prompt}\n<|im_start|>assistant\n'
      )
  assert not asked


def test_directory_has_every_file_of_the_design(workdir):
  config = tiny.config(
    evaluation={'every': 1},
    reporting={'plots': True, 'tensorboard': True},
  )
  summary = build.run(config, workdir)
  assert summary.endswith(f'report: {workdir}/report.html')
  found = {p.name for p in workdir.iterdir()}
  assert found == {
    'checkpoints',
    'config.json',
    'curve.csv',
    'curve.png',
    'data',
    'evals.jsonl',
    'fit.json',
    'metrics.jsonl',
    'report.html',
    'samples.jsonl',
    'tensorboard',
    'warm_start',
  }
  resolved = json.loads((workdir / 'config.json').read_text())
  assert set(resolved) == {'config', 'versions', 'commit'}
  completed, _ = build.complete(config)
  assert config_lib.from_config_dict(resolved['config']) == completed
  assert resolved['versions']['jax'] == jax.__version__
  fit = json.loads((workdir / 'fit.json').read_text())
  assert {'params', 'intervals', 'warnings', 'forecast', 'verdict'} <= set(fit)
  curve = (workdir / 'curve.csv').read_text().splitlines()
  assert curve[0] == 'compute,pass_rate,stderr,step'
  evals = tiny.rows(workdir, 'evals')
  for line, row in zip(curve[1:], evals, strict=True):
    values = [float(v) for v in line.split(',')]
    assert values == [
      row['flops'],
      row['pass_rate'],
      row['pass_rate_stderr'],
      row['step'],
    ]
  assert list((workdir / 'tensorboard').iterdir())


def test_rows_have_the_keys_of_the_design(reference):
  text = (reference / 'evals.jsonl').read_text()
  evals = [json.loads(line) for line in text.splitlines()]
  for row in evals:
    assert {
      'step',
      'policy_version',
      'device_hours',
      'flops',
      'tokens',
      'pass_rate',
      'pass_rate_stderr',
      'num_problems',
      'samples_per_problem',
      'truncated_fraction',
    } <= set(row)
  for axis in ('device_hours', 'flops', 'tokens'):
    values = [row[axis] for row in evals]
    assert values[0] == 0
    assert values == sorted(set(values))
  metrics = tiny.rows(reference, 'metrics')
  assert [row['step'] for row in metrics] == [1, 2, 3, 4]
  assert sum(row['num_prompts_kept'] for row in metrics) > 0
  for row in metrics:
    assert bool(row['num_tokens']) == bool(row['num_prompts_kept'])
    assert row['num_tokens'] < row['num_batch_tokens']
  assert {p.name for p in (reference / 'checkpoints').iterdir()} == {'2', '4'}


def test_same_seed_is_the_same_run_from_the_warm_start_on(reference, tmp_path):
  config = tiny.config()
  build.run(config, tmp_path)
  assert tiny.rows(tmp_path, 'warm_start') == tiny.rows(reference, 'warm_start')
  _assert_same_run(config, tmp_path, reference)


def test_another_seed_is_another_run(reference, workdir):
  build.run(tiny.config(seed=1), workdir)
  assert tiny.rows(workdir, 'samples') != tiny.rows(reference, 'samples')


def test_s03_generator_makes_exactly_what_is_consumed(reference):
  config = tiny.config()
  producer = _restore(config, reference).host['producer']
  visits = config.num_updates * config.batch.prompts
  assert producer['sampler']['num_visits'] == visits
  assert producer['engine']['active'] == []
  assert producer['complete'] == []


def test_lag_is_real_and_within_the_bound(reference):
  metrics = tiny.rows(reference, 'metrics')
  assert 1 <= max(row['lag_max'] for row in metrics) <= 2


class _KilledError(Exception):
  pass


def _kill():
  raise _KilledError


@pytest.mark.parametrize(
  'moment', ['update 1/', 'evaluation at 2', 'update 3/', 'evaluation at 4']
)
def test_r01_r06_r10_s05_killed_run_resumes_to_the_bit(
  reference, workdir, moment
):
  config = tiny.config()
  with tiny.when_logged(moment, _kill), pytest.raises(_KilledError):
    build.run(config, workdir)
  has_checkpoint = any((workdir / 'checkpoints').glob('*/digests.json'))
  if has_checkpoint:  # Then the base policy is not asked for again.
    shutil.rmtree(workdir / 'warm_start')
  build.run(config, workdir)
  assert (workdir / 'warm_start').exists() != has_checkpoint
  _assert_same_run(config, workdir, reference)


def test_r06_checkpoint_holds_the_buffer_and_what_is_in_flight(workdir):
  config = tiny.config()
  with tiny.when_logged('update 3/', _kill), pytest.raises(_KilledError):
    build.run(config, workdir)
  restored = _restore(config, workdir)
  assert restored.updates == 2
  producer = restored.host['producer']
  assert producer['complete']
  assert producer['engine']['active']
  visits = [v[0] for v in producer['visits']]
  assert visits == [p['request']['visit'] for p in producer['engine']['active']]


def test_damaged_newest_checkpoint_falls_back_to_the_one_before(
  reference, tmp_path, caplog
):
  workdir = tmp_path / 'run'
  shutil.copytree(reference, workdir)
  _damage(workdir / 'checkpoints' / '4')
  config = tiny.config()
  with caplog.at_level(logging.WARNING, logger='scalerl_jax'):
    build.run(config, workdir)
  path = workdir / 'checkpoints' / '4'
  assert any(f'checkpoint {path} is passed over' in m for m in caplog.messages)
  _assert_same_run(config, workdir, reference)


def test_where_no_checkpoint_can_be_read_nothing_is_touched(
  reference, tmp_path
):
  workdir = tmp_path / 'run'
  shutil.copytree(reference, workdir)
  for updates in ('2', '4'):
    _damage(workdir / 'checkpoints' / updates)
  before = _files(workdir)
  with pytest.raises(
    config_lib.ConfigError, match=r'all checkpoints in .* are'
  ):
    build.run(tiny.config(), workdir)
  assert _files(workdir).keys() == before.keys()
  assert _files(workdir)['metrics.jsonl'] == before['metrics.jsonl']


def _damage(checkpoint: pathlib.Path):
  """Flips a byte in the largest file."""
  files = [p for p in checkpoint.rglob('*') if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 0xFF
  largest.write_bytes(content)


def _files(workdir: pathlib.Path):
  return {
    str(p.relative_to(workdir)): p.read_bytes()
    for p in workdir.rglob('*')
    if p.is_file()
  }


def test_directory_of_another_configuration_is_refused(reference):
  before = _files(reference)
  with pytest.raises(
    config_lib.ConfigError,
    match=r'optimizer\.learning_rate: 0\.001 -> 0\.002',
  ):
    build.run(tiny.config(optimizer={'learning_rate': 2e-3}), reference)
  assert _files(reference) == before


def test_directory_that_is_a_file_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  for workdir in (tmp_path / 'file', tmp_path / 'file' / 'run'):
    with pytest.raises(
      config_lib.ConfigError, match=f'{workdir} cannot be written to: .+'
    ):
      build.run(tiny.config(), workdir)


@pytest.mark.parametrize('version', [0, 4])
def test_s08_s10_evaluation_is_of_the_version_it_names(reference, version):
  config = tiny.config()
  if version:
    params = _restore(config, reference).train_state.params
  else:
    cache = checkpointing.Checkpointer(reference / 'warm_start', keep=1)
    template = models.init_params(_spec(config), jax.random.key(0))
    params = cache.restore(template).train_state
    cache.close()
  rows = [
    r for r in tiny.rows(reference, 'evals') if r['policy_version'] == version
  ]
  assert [row['step'] for row in rows] == [version]
  samples = [r for r in tiny.rows(reference, 'samples') if r['step'] == version]
  assert [s['response'] for s in samples] == _responses(
    config, params, version, prompts=[s['prompt'] for s in samples]
  )


def _responses(config, params, version, *, prompts):
  """Generates, with an engine of its own, what an evaluation samples first."""
  length = config.length
  interruption = length_control.Interruption(
    min_tokens=length.min_thinking_tokens,
    max_tokens=length.max_thinking_tokens,
    phrase_ids=tuple(_TOKENIZER.encode(length.phrase)),
    answer_tokens=length.answer_tokens,
  )
  spec = decode.DecodeSpec(
    model=_spec(config),
    num_slots=config.engine.num_slots,
    prompt_tokens=config.data.max_prompt_tokens,
    response_tokens=interruption.max_response_tokens,
    steps_per_dispatch=config.engine.steps_per_dispatch,
    temperature=config.engine.temperature,
    stop_ids=_TOKENIZER.stop_ids,
    interruption=interruption,
  )
  key = jax.random.split(jax.random.key(config.seed), 3)[2]
  engine = jax_engine.JaxEngine(spec, key=key)
  engine.update_weights(params, version)
  groups = engine.generate(
    [
      records.Request(
        visit=version * len(prompts) + i,
        problem_id=prompt,
        prompt_ids=np.array(_TOKENIZER.encode(prompt), np.int32),
        num_samples=config.evaluation.samples_per_problem,
      )
      for i, prompt in enumerate(prompts)
    ]
  )
  return [_TOKENIZER.decode(g.rollouts[0].token_ids.tolist()) for g in groups]


def test_evaluating_more_often_changes_no_update(reference, workdir):
  build.run(tiny.config(evaluation={'every': 1}), workdir)
  assert tiny.rows(workdir, 'metrics') == tiny.rows(reference, 'metrics')
  evals = [r for r in tiny.rows(workdir, 'evals') if r['step'] % 2 == 0]
  assert evals == tiny.rows(reference, 'evals')


def test_p07_synchronous_run_is_on_policy_and_can_be_prolonged(
  workdir, tmp_path
):
  sections = {
    'pipeline': {'max_lag': 0, 'lockstep_lead': 0},
    'engine': {'temperature': 0.7},
    'optimizer': {'learning_rate': 1e-2},
  }
  config = tiny.config(**sections)
  shutil.copytree(workdir, tmp_path / 'prolonged')
  build.run(config, workdir)
  metrics = tiny.rows(workdir, 'metrics')
  assert sum(row['num_prompts_kept'] for row in metrics) > 0
  for row in metrics:
    assert row['lag_max'] == 0
    assert row['logp_diff_max'] < 1e-4
    if row['num_prompts_kept']:
      assert row['ratio_max'] == pytest.approx(1, abs=1e-4)
      assert row['ratio_min'] == pytest.approx(1, abs=1e-4)
  for num_updates in (2, 4):
    build.run(
      tiny.config(**sections, num_updates=num_updates), tmp_path / 'prolonged'
    )
  _assert_same_run(config, tmp_path / 'prolonged', workdir)


def test_l08_eight_devices_train_as_one(reference, workdir):
  build.run(tiny.config(mesh={'data': 8}), workdir)
  metrics = tiny.rows(workdir, 'metrics')
  for one, eight in zip(tiny.rows(reference, 'metrics'), metrics, strict=True):
    for name in ('loss', 'grad_norm', 'policy_entropy', 'ratio_mean'):
      assert eight[name] == pytest.approx(one[name], abs=1e-5)


def test_a_rollout_per_row_trains_as_packed_rows(reference, workdir):
  build.run(tiny.config(batch={'packed': False}), workdir)
  metrics = tiny.rows(workdir, 'metrics')
  for packed, row in zip(tiny.rows(reference, 'metrics'), metrics, strict=True):
    assert packed['padding_fraction'] != row['padding_fraction']
    for name in ('loss', 'grad_norm', 'policy_entropy', 'ratio_mean'):
      assert row[name] == pytest.approx(packed[name], abs=1e-5)


def test_ppo_off_policy_runs_in_phases(workdir):
  config = tiny.config(
    recipe='grpo',
    pipeline={'algorithm': 'ppo_off_policy', 'lockstep_lead': 0},
  )
  build.run(config, workdir)
  metrics = tiny.rows(workdir, 'metrics')
  assert [row['num_buffered'] for row in metrics] == [2, 0, 2, 0]
  for row in metrics:
    if row['num_prompts_kept']:
      assert row['lag_mean'] == row['lag_max'] == (row['step'] - 1) % 2


def test_threads_run_with_real_parts(workdir):
  config = tiny.config(pipeline={'schedule': 'threads'})
  build.run(config, workdir)
  metrics = tiny.rows(workdir, 'metrics')
  assert [row['step'] for row in metrics] == [1, 2, 3, 4]
  assert max(row['lag_max'] for row in metrics) <= 2
  sampler = _restore(config, workdir).host['producer']['sampler']
  assert sampler['num_visits'] == config.num_updates * config.batch.prompts
  evals = tiny.rows(workdir, 'evals')
  assert [row['policy_version'] for row in evals] == [0, 2, 4]


def test_ctrl_c_finishes_the_update_saves_and_resumes(reference, workdir):
  config = tiny.config()
  with tiny.when_logged(
    'update 3/', lambda: signal.raise_signal(signal.SIGINT)
  ):
    summary = build.run(config, workdir)
  assert summary.endswith(
    f'interrupted; run the same command with --workdir={workdir} to resume'
  )
  assert (workdir / 'checkpoints' / '3').is_dir()
  assert len(tiny.rows(workdir, 'metrics')) == 3
  build.run(config, workdir)
  # What was in flight at 3 had its cache refreshed, so only ids must agree.
  assert [r['step'] for r in tiny.rows(workdir, 'metrics')] == [1, 2, 3, 4]
  assert [r['step'] for r in tiny.rows(workdir, 'evals')] == [0, 2, 4]
  a, b = _restore(config, workdir), _restore(config, reference)
  for name in ('num_visits', 'epoch', 'position'):
    assert (
      a.host['producer']['sampler'][name]
      == (b.host['producer']['sampler'][name])
    )


def test_second_ctrl_c_stops_at_once(reference, workdir):
  def press_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)

  config = tiny.config()
  with tiny.when_logged('update 3/', press_twice):
    assert 'interrupted' in build.run(config, workdir)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert _restore(config, workdir).updates == 2
  build.run(config, workdir)
  _assert_same_run(config, workdir, reference)


def test_diverged_run_stops_with_the_reason_and_a_checkpoint(workdir):
  config = tiny.config(
    optimizer={
      'learning_rate': 1e38,
      'warmup_steps': 0,
      'max_nonfinite_streak': 1,
    }
  )
  with pytest.raises(build.RunError, match=r'lower optimizer\.learning_rate'):
    build.run(config, workdir)
  metrics = tiny.rows(workdir, 'metrics')
  assert metrics[-1]['update_skipped'] == 1
  assert _restore(config, workdir).updates == metrics[-1]['step']


def test_r03_changed_problems_are_refused(workdir, tmp_path):
  path = tmp_path / 'train.jsonl'
  config = tiny.config(
    num_updates=1,
    data={
      'train_path': str(path),
      'toy': {'num_eval': 6, 'max_operations': 2},
    },
  )
  row = {'problem_id': 'a', 'prompt': '1+1=', 'answer': '2'}
  row['verifier'] = 'integer'
  path.write_text(json.dumps(row) + '\n')
  build.run(config, workdir)
  path.write_text(json.dumps(row | {'prompt': '2+0='}) + '\n')
  with pytest.raises(data.DataError, match='problems changed since'):
    build.run(config, workdir)
