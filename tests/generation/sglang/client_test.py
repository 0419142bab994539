"""Replies of a server, as they were recorded, and such as must not be used."""

import asyncio
import base64
import copy

import numpy as np
import pytest

from scalerl_jax.generation.sglang import client as client_lib
from scalerl_jax.generation.sglang import fleet as fleet_lib

# Of SGLang 0.5.23: weights changed in place after the second token.
REPLY = {
  'text': '',
  'output_ids': [87, 460, 288],
  'meta_info': {
    'id': 'span',
    'finish_reason': {'type': 'length', 'length': 3},
    'prompt_tokens': 6,
    'weight_version': 'w',
    'num_retractions': 1,
    'input_token_logprobs': [],
    'output_token_logprobs': [
      [-6.985647201538086, 87, None],
      [-5.274440288543701, 460, None],
      [-5.546737194061279, 288, None],
    ],
    'completion_tokens': 3,
    'cached_tokens': 5,
    'weight_versions': [
      {'version': 'v7', 'start': 0, 'end': 2},
      {'version': 'w', 'start': 2, 'end': 3},
    ],
  },
}


def changed(path, value):
  reply = copy.deepcopy(REPLY)
  *inner, last = path
  node = reply
  for key in inner:
    node = node[key]
  node[last] = value
  return reply


def test_an_answer_tells_the_weights_of_each_token():
  found = client_lib.parse_answer(REPLY)
  assert found.token_ids.tolist() == [87, 460, 288]
  assert found.token_ids.dtype == np.int32
  np.testing.assert_allclose(found.logps, [-6.985647, -5.27444, -5.546737])
  assert found.logps.dtype == np.float32
  assert found.tags == ('v7', 'v7', 'w')
  assert found.ending is client_lib.Ending.LENGTH
  assert (found.num_cached, found.num_retractions) == (5, 1)


def test_k08_an_abort_keeps_what_was_sampled():
  reply = changed(
    ('meta_info', 'finish_reason'), {'type': 'abort', 'message': 'Aborted'}
  )
  found = client_lib.parse_answer(reply)
  assert found.ending is client_lib.Ending.ABORT
  assert found.message == 'Aborted'
  assert len(found.token_ids) == 3


def test_an_abort_before_the_first_token_has_none():
  reply = changed(('output_ids',), [])
  reply['meta_info'] |= {
    'finish_reason': {'type': 'abort', 'message': None},
    'output_token_logprobs': [],
  }
  found = client_lib.parse_answer(reply)
  assert len(found.token_ids) == len(found.logps) == len(found.tags) == 0


@pytest.mark.parametrize(
  ('path', 'value', 'message'),
  [
    (('output_ids',), [87, 460], 'not those of output_ids'),
    (('output_ids',), [460, 87, 288], 'not those of output_ids'),
    (('meta_info', 'output_token_logprobs'), None, 'TypeError'),
    (
      ('meta_info', 'output_token_logprobs', 1),
      [float('nan'), 460, None],
      'not finite',
    ),
    (('meta_info', 'output_token_logprobs', 1), [None, 460, None], 'not fin'),
    (('meta_info', 'weight_versions'), [], 'tell of 0 tokens of 3'),
    (('meta_info', 'weight_versions', 1, 'start'), 1, 'a gap at token 2'),
    (('meta_info', 'weight_versions', 1, 'end'), 9, 'tell of 9 tokens of 3'),
    (('meta_info', 'finish_reason'), {'type': 'bored'}, 'bored'),
    (('meta_info', 'finish_reason'), None, 'TypeError'),
    (('meta_info',), {}, 'KeyError'),
  ],
)
def test_p01_a_reply_that_leaves_something_open_is_not_used(
  path, value, message
):
  with pytest.raises(client_lib.UnavailableError, match=message):
    client_lib.parse_answer(changed(path, value))
  with pytest.raises(client_lib.UnavailableError):
    client_lib.parse_answer('<html>')


# Of 6 given and 3 sampled tokens the model read 8, the last 4 from 4 on.
ROUTING = client_lib.Routing(num_layers=2, experts_per_token=1, start=4)


def told(numbers, **changes):
  text = base64.b64encode(np.array(numbers, '<i4').tobytes()).decode()
  reply = changed(('meta_info', 'routed_experts'), text)
  reply['meta_info'] |= changes
  return client_lib.parse_answer(reply, num_given=6, routing=ROUTING)


def test_m04_experts_are_those_of_each_token_that_was_read():
  found = told(range(8)).routed_experts
  assert found.tolist() == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]


@pytest.mark.parametrize(
  ('numbers', 'message'),
  [(range(7), 'reshape'), (range(10), 'reshape'), ([-1] * 8, 'expert -1')],
)
def test_m04_experts_of_other_tokens_are_not_used(numbers, message):
  with pytest.raises(client_lib.UnavailableError, match=message):
    told(numbers)


def test_m04_experts_that_no_kernel_recorded_are_not_used():
  text = base64.b64encode(np.zeros(8, '<i4').tobytes()).decode()
  reply = changed(('meta_info', 'routed_experts'), text)
  routing = client_lib.Routing(num_layers=1, experts_per_token=2, start=4)
  with pytest.raises(client_lib.UnavailableError, match='an expert twice'):
    client_lib.parse_answer(reply, num_given=6, routing=routing)


def test_m04_experts_are_missing_after_an_abort_only():
  def parse(ending):
    reply = changed(('meta_info', 'finish_reason'), {'type': ending})
    return client_lib.parse_answer(reply, num_given=6, routing=ROUTING)

  assert parse('abort').routed_experts is None
  with pytest.raises(client_lib.UnavailableError, match='are missing'):
    parse('length')


def ask(reply, call):
  """Calls a server that answers `reply`; None: nothing, until one leaves."""

  async def main():
    served = []

    async def serve(reader, writer):
      served.append(asyncio.current_task())
      await reader.readuntil(b'\r\n\r\n')
      writer.write(reply or b'')
      await reader.read()
      writer.close()
      await writer.wait_closed()

    server = await asyncio.start_server(serve, '127.0.0.1', 0)
    port = server.sockets[0].getsockname()[1]
    made = client_lib.Client(f'http://127.0.0.1:{port}', control_s=0.5)
    try:
      await call(made)
    finally:
      await made.close()
      server.close()
      await asyncio.gather(*served, return_exceptions=True)

  asyncio.run(main())


def test_p08_p11_nothing_of_sampling_is_left_to_the_server(monkeypatch):
  sent = {}

  async def call(self, method, path, body, *, deadline_s):
    sent.update(body)
    return REPLY

  monkeypatch.setattr(client_lib.Client, '_call', call)
  client = client_lib.Client('http://nowhere', control_s=1.0)
  how = {'request_id': 'a', 'cache_key': 'k', 'deadline_s': 1.0}
  asyncio.run(
    client.generate([5, 6], max_tokens=3, temperature=0.7, stop_ids=(1,), **how)
  )
  assert sent['sampling_params'] == {
    'max_new_tokens': 3,
    'temperature': 0.7,
    'top_p': 1.0,
    'top_k': -1,
    'min_p': 0.0,
    'frequency_penalty': 0.0,
    'presence_penalty': 0.0,
    'repetition_penalty': 1.0,
    'stop_token_ids': [1],
  }
  assert 'return_routed_experts' not in sent


@pytest.mark.parametrize(
  ('name', 'args'), [('info', ()), ('pause', ('in_place',)), ('checksums', ())]
)
def test_w02_every_call_has_a_deadline(name, args):
  with pytest.raises(
    client_lib.UnavailableError, match=r'127.0.0.1:\d+/\w+: no answer in 0.5 s'
  ):
    ask(None, lambda client: getattr(client, name)(*args))


@pytest.mark.parametrize(
  ('path', 'status', 'error'),
  [
    ('/generate', 400, client_lib.RefusedError),
    ('/generate', 503, client_lib.UnavailableError),
    # A load that failed is told so too, and may go well the next time.
    ('/update_weights_from_disk', 400, client_lib.UnavailableError),
  ],
)
def test_errors_are_told_apart(path, status, error):
  text = b'{"error":{"message":"The input is too long"}}'
  head = f'HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n'
  with pytest.raises(error, match=f'{path}: HTTP {status}: .*too long'):
    ask(head.encode() + text, lambda client: client._call('POST', path, {}))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, ''),
    ({'context_length': 107}, 'context_length=107 must be at least 108'),
    ({'enable_fp32_lm_head': False}, ''),
    ({'dtype': 'bfloat16'}, ''),
    (
      {'dtype': 'bfloat16', 'enable_fp32_lm_head': False},
      'start it with --enable-fp32-lm-head',
    ),
    ({'tokenizer_worker_num': 2}, 'one of several tokenizer workers'),
    ({'speculative_algorithm': 'EAGLE'}, 'speculative decoding'),
  ],
)
def test_w12_settings_that_a_run_cannot_use_are_named(changes, message):
  info = {
    'context_length': 108,
    'dtype': 'float32',
    'enable_fp32_lm_head': True,
    'tokenizer_worker_num': 1,
    'speculative_algorithm': None,
  }
  found = fleet_lib._misfit(info | changes, 100, needs_routing=False)
  assert message in found
  assert bool(found) == bool(message)
