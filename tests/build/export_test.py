"""The policy of a run as a checkpoint of Hugging Face."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from launch import convert
from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.training import checkpointing
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib
from tests import tiny


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run's directory with two checkpoints, and the parameters of each."""
  workdir = tmp_path_factory.mktemp('run')
  config = tiny.config()
  spec = config.model.spec(vocab_size=data.ByteTokenizer().vocab_size)
  tx = optimizer.make_optimizer(config.optimizer)
  (workdir / 'config.json').write_text(
    json.dumps({'config': config_lib.to_dict(config)})
  )
  checkpointer = checkpointing.Checkpointer(workdir / 'checkpoints', keep=2)
  params = {}
  for updates in (3, 12):
    params[updates] = models.init_params(spec, jax.random.key(updates))
    state = state_lib.init(params[updates], tx)
    checkpointer.save(updates, train_state=state, host={})
  checkpointer.close()
  return workdir, spec, params


def _call(capsys, *args):
  code = convert.main(['convert.py', *map(str, args)])
  return code, *capsys.readouterr()


@pytest.mark.parametrize(
  ('flags', 'updates'), [((), 12), (('--updates=3',), 3)]
)
def test_weights_are_those_of_the_checkpoint(
  capsys, run, tmp_path, flags, updates
):
  workdir, spec, params = run
  out = tmp_path / 'out'
  code, text, err = _call(capsys, workdir, out, '--dtype=float32', *flags)
  assert (code, err) == (0, '')
  assert text == f'wrote {out}: {updates} updates, float32\n'
  assert hf.spec_from_hf(hf.read_config(out), dtype=spec.dtype) == spec
  got = hf.load_params(out, spec)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, got, params[updates]))


def test_a_damaged_checkpoint_is_passed_over_and_left_as_it_is(run, tmp_path):
  workdir, spec, params = run
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  (copy / 'checkpoints' / '12' / 'digests.json').unlink()
  assert build.export(copy, tmp_path / 'out', dtype='float32') == 3
  got = hf.load_params(tmp_path / 'out', spec)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, got, params[3]))
  assert (copy / 'checkpoints' / '12').exists()


def _other_model(workdir):
  path = workdir / 'config.json'
  fields = json.loads(path.read_text())
  fields['config']['model']['hidden_dim'] += 2
  path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
  ('damage', 'flags', 'message'),
  [
    (lambda d: (d / 'config.json').unlink(), (), 'give the directory of a run'),
    (lambda d: (d / 'config.json').write_text('{}'), (), 'not that of a run'),
    (lambda d: shutil.rmtree(d / 'checkpoints'), (), 'has no checkpoint'),
    (lambda d: None, ('--updates=4',), 'has no checkpoint 4'),
    (
      lambda d: (d / 'checkpoints' / '3' / 'digests.json').unlink(),
      ('--updates=3',),
      '3: it was not finished',
    ),
    (_other_model, (), 'holds other parameters'),
    (lambda d: None, ('--dtype=int4',), 'int4'),
    (lambda d: None, ('odd',), 'give RUN_DIRECTORY and OUT'),
    (lambda d: (d.parent / 'out').mkdir(), (), 'exists; give a new directory'),
  ],
)
def test_bad_input_is_one_line(capsys, run, tmp_path, damage, flags, message):
  copy = shutil.copytree(run[0], tmp_path / 'copy')
  damage(copy)
  code, text, err = _call(capsys, copy, tmp_path / 'out', *flags)
  assert (code, text) == (2, '')
  assert message in err
  assert err.startswith('error: ')
  assert err.count('\n') == 1
  assert not (tmp_path / 'out' / 'config.json').exists()


def test_help(capsys):
  code, text, _ = _call(capsys, '--help')
  assert code == 0
  assert 'RUN_DIRECTORY OUT' in text
  assert '--updates' in text
