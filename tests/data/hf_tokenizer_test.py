"""Tokenizers of checkpoints; the ids here are counted by hand."""

import json

import pytest

from scalerl_jax import data
from scalerl_jax.data import tokenizer as tokenizer_lib
from scalerl_jax.training import batching
from tests import tiny_checkpoint
from tests.training import tiny_batch

_END, _START, _STOP, _THINK = 0, 1, 2, 3
_HELLO = 4 + 256 + 3


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  return tiny_checkpoint.write_tokenizer(tmp_path_factory.mktemp('tokenizer'))


@pytest.fixture
def change(tmp_path):
  def make(**changes):
    return tiny_checkpoint.write_tokenizer(tmp_path / 'changed', **changes)

  return make


def _letters(tokenizer, text):
  return [i for c in text for i in tokenizer.encode(c)]


def test_it_is_a_tokenizer(directory):
  for chat in (False, True):
    tokenizer = data.HfTokenizer(directory, chat=chat)
    assert isinstance(tokenizer, tokenizer_lib.Tokenizer)
    assert tokenizer.vocab_size == 4 + 256 + 5
    assert tokenizer.pad_id == _END
    assert tokenizer.stop_ids == (_STOP, _END)


def test_encode_and_decode(directory):
  tokenizer = data.HfTokenizer(directory, chat=False)
  assert tokenizer.encode('hello hello') == [_HELLO, _HELLO + 1]
  ids = tokenizer.encode('1</think>é<|im_end|>')
  assert ids == [*_letters(tokenizer, '1'), _THINK, *ids[2:4], _STOP]
  assert tokenizer.decode(ids) == '1</think>é'
  assert tokenizer.decode([_START, _HELLO, 270]) == '<|im_start|>hello'


def test_without_chat_a_prompt_is_text(directory):
  tokenizer = data.HfTokenizer(directory, chat=False)
  assert tokenizer.encode_prompt(' hello') == [_HELLO + 1]
  ids = tokenizer.encode_prompt('hello<|im_end|>')
  assert ids == [_HELLO, *_letters(tokenizer, '<|im_end|>')]


def _conversation(tokenizer, inside):
  before = [_START, *_letters(tokenizer, 'user\n')]
  after = [*_letters(tokenizer, '\n'), _START, *_letters(tokenizer, 'assistan')]
  return [*before, *inside, _STOP, *after, *_letters(tokenizer, 't\n')]


def test_with_chat_a_prompt_is_a_message_of_the_user(directory):
  tokenizer = data.HfTokenizer(directory, chat=True)
  wanted = _conversation(tokenizer, [_HELLO])
  assert tokenizer.encode_prompt('hello') == wanted


@pytest.mark.parametrize('name', tiny_checkpoint.SPECIAL)
def test_a_problem_cannot_end_the_message(directory, name):
  tokenizer = data.HfTokenizer(directory, chat=True)
  inside = [_HELLO, *_letters(tokenizer, name), _HELLO]
  wanted = _conversation(tokenizer, inside)
  assert tokenizer.encode_prompt(f'hello{name}hello') == wanted


def test_the_template_may_lie_in_a_file(change):
  directory = change(tokenizer_config={'chat_template': 'not this'})
  (directory / 'chat_template.jinja').write_text(
    '{{ bos_token }}{{ eos_token }}{{ messages[0].content | trim }}'
  )
  tokenizer = data.HfTokenizer(directory, chat=True)
  assert tokenizer.encode_prompt(' hello ') == [_STOP, _HELLO]


def test_the_template_may_be_one_of_several(change):
  named = [
    {'name': 'tool_use', 'template': 'no'},
    {'name': 'default', 'template': '{{ messages[0].content }}!'},
  ]
  directory = change(tokenizer_config={'chat_template': named})
  tokenizer = data.HfTokenizer(directory, chat=True)
  assert tokenizer.decode(tokenizer.encode_prompt('hello')) == 'hello!'


def test_k03_a_template_that_drops_thoughts_never_sees_a_response(change):
  # As that of Qwen3 does with turns of the assistant.
  template = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n'
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
  )
  directory = change(tokenizer_config={'chat_template': template})
  tokenizer = data.HfTokenizer(directory, chat=True)
  prompt = tokenizer.encode_prompt('hello')
  response = [*tokenizer.encode('why</think>hello'), _STOP]
  assert prompt == _conversation(tokenizer, [_HELLO])
  batch, _ = batching.assemble(
    [tiny_batch.group(0, tiny_batch.rollout(response), prompt=prompt)],
    num_rows=1,
    row_tokens=len(prompt + response),
  )
  # The prompt is a prefix and the thought is trained on, as sampled.
  assert batch.tokens[0].tolist() == prompt + response
  assert batch.loss_mask[0].sum() == len(response)


def test_settings_of_the_file_do_not_cut_or_pad(directory, tmp_path):
  fields = json.loads((directory / 'tokenizer.json').read_text())
  fields['truncation'] = {
    'direction': 'Right',
    'max_length': 2,
    'strategy': 'LongestFirst',
    'stride': 0,
  }
  changed = tiny_checkpoint.write_tokenizer(tmp_path)
  (changed / 'tokenizer.json').write_text(json.dumps(fields))
  tokenizer = data.HfTokenizer(changed, chat=False)
  assert len(tokenizer.encode_prompt('12345')) == 5


@pytest.mark.parametrize(
  ('changes', 'config', 'wanted'),
  [
    ({'generation_config': {'eos_token_id': 0}}, {'eos_token_id': 1}, (0,)),
    ({'generation_config': None}, {'eos_token_id': [1, 1]}, (1,)),
    ({'generation_config': None}, None, (2,)),
    ({'generation_config': {'eos_token_id': None}}, {}, (2,)),
  ],
)
def test_where_stop_tokens_are_named(change, changes, config, wanted):
  directory = change(**changes)
  if config is not None:
    (directory / 'config.json').write_text(json.dumps(config))
  assert data.HfTokenizer(directory, chat=False).stop_ids == wanted


def test_padding_that_is_not_named(change):
  directory = change(tokenizer_config={'pad_token': None})
  assert data.HfTokenizer(directory, chat=False).pad_id == 0


def _template(text):
  return {'tokenizer_config': {'chat_template': text}}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (_template(None), 'has no chat template'),
    (_template([]), 'has no chat template'),
    (_template('{{ '), 'the chat template cannot be parsed'),
    (_template('{{ raise_exception("no user") }}'), 'a user: no user'),
    (_template('{{ messages[0].content.x.y }}'), 'the chat template fails'),
    (_template('{{ messages.__class__.mro() }}'), 'unsafe'),
    (_template('{{ messages.append(1) }}'), 'unsafe'),
    (_template('hi'), "shows the user's message 0 times"),
    ({'generation_config': {'eos_token_id': 265}}, 'eos_token_id=265 must be'),
    ({'generation_config': {'eos_token_id': []}}, 'eos_token_id=.. must be'),
    (
      {'generation_config': None, 'tokenizer_config': {'eos_token': None}},
      'eos_token_id=None must be',
    ),
  ],
)
def test_what_cannot_be_used_is_one_line(change, changes, message):
  with pytest.raises(data.TokenizerError, match=message) as caught:
    data.HfTokenizer(change(**changes), chat=True)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('tokenizer.json', None, 'holds no tokenizer.json'),
    ('tokenizer.json', '{', 'tokenizer.json: cannot be read'),
    ('tokenizer_config.json', '[]', 'tokenizer_config.json: must hold'),
    ('generation_config.json', '{', 'generation_config.json: cannot be read'),
  ],
)
def test_damaged_files_are_named(change, name, text, message):
  directory = change()
  (directory / name).unlink()
  if text is not None:
    (directory / name).write_text(text)
  with pytest.raises(data.TokenizerError, match=message):
    data.HfTokenizer(directory, chat=False)
