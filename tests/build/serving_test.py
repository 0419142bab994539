"""The servers that a configuration asks for."""

import json
import sys

import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import hf
from tests import tiny


def _config(**sglang):
  return tiny.config(
    engine={
      'kind': 'sglang',
      'start_servers': True,
      'sglang': {'python': sys.executable, **sglang},
    }
  )


def test_servers_are_as_configured(tmp_path):
  specs = build.server_specs(
    _config(num_servers=2, device='cpu', max_total_tokens=999, first_port=4000),
    tmp_path,
  )
  assert [spec.port for spec in specs] == [4000, 4001]
  assert len({spec.log_path for spec in specs}) == 2
  for spec in specs:
    assert (spec.host, spec.device, spec.args) == ('127.0.0.1', 'cpu', ())
    assert (spec.max_running_requests, spec.max_total_tokens) == (8, 999)
    assert spec.context_tokens > 48 + 2  # Else SGLang would cut answers short.
    assert spec.api_key is None


def test_model_is_a_configuration_without_weights(tmp_path):
  (spec,) = build.server_specs(_config(), tmp_path)
  assert [p.name for p in spec.model_path.iterdir()] == ['config.json']
  content = json.loads((spec.model_path / 'config.json').read_text())
  model = hf.spec_from_hf(content, dtype=spec.dtype)
  assert (model.num_layers, model.model_dim) == (1, 32)
  assert spec.max_total_tokens is None


@pytest.mark.parametrize(
  ('args', 'first'),
  [((), '1'), (('--tp-size', '4'), '4'), (('--tp=2',), '2')],
)
def test_each_server_takes_the_next_devices(tmp_path, args, first):
  specs = build.server_specs(_config(num_servers=2, args=args), tmp_path)
  assert specs[0].args == ('--base-gpu-id', '0', *args)
  assert specs[1].args == ('--base-gpu-id', first, *args)


def test_ports_are_found_and_the_key_is_of_the_environment(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('SCALERL_SGLANG_API_KEY', 'secret')
  specs = build.server_specs(_config(num_servers=3), tmp_path, host='0.0.0.0')
  assert len({spec.port for spec in specs}) == 3
  assert {spec.api_key for spec in specs} == {'secret'}


@pytest.mark.parametrize(
  ('fields', 'host', 'message'),
  [
    ({'python': ''}, '127.0.0.1', 'this interpreter, which has no SGLang'),
    ({'python': 'nowhere/python'}, '127.0.0.1', 'is no program'),
    ({'first_port': 65535, 'num_servers': 2}, '127.0.0.1', 'port=65536 must'),
    ({'args': ['--tp-size', 'x']}, '127.0.0.1', 'engine.sglang: '),
    ({}, '0.0.0.0', 'needs an api_key'),
  ],
)
def test_what_cannot_be_served_is_refused(
  tmp_path, monkeypatch, fields, host, message
):
  monkeypatch.delenv('SCALERL_SGLANG_API_KEY', raising=False)
  with pytest.raises(config_lib.ConfigError, match=message):
    build.server_specs(_config(**fields), tmp_path, host=host)
