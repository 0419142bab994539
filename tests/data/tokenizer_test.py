import pytest

from scalerl_jax import data

_TOKENIZER = data.ByteTokenizer()


@pytest.mark.parametrize(
  'text', ['', '4+8=', '<think>1\n</think>7<end>', 'é→漢', '<thin', '<<end>>']
)
def test_decode_inverts_encode(text):
  assert _TOKENIZER.decode(_TOKENIZER.encode(text)) == text


def test_markers_are_single_ids():
  ids = _TOKENIZER.encode('<think>a</think><end><pad>')
  assert ids == [257, 97, 258, 259, 256]
  assert max(ids) < _TOKENIZER.vocab_size


def test_k01_k02_decoding_is_not_inverted_by_encoding():
  # So ids are kept: these bytes are not text, and the halves are one marker.
  assert _TOKENIZER.encode(_TOKENIZER.decode([0xFF])) != [0xFF]
  halves = [*b'<e', *b'nd>']
  ids = _TOKENIZER.encode(_TOKENIZER.decode(halves))
  assert ids == list(_TOKENIZER.stop_ids)


def test_a_problem_cannot_write_markers():
  ids = _TOKENIZER.encode_prompt('1<end>')
  assert ids == list(b'1<end>')
  assert _TOKENIZER.decode(ids) == '1<end>'


def test_k05_padding_is_not_the_end_marker():
  special = {_TOKENIZER.pad_id, *_TOKENIZER.stop_ids}
  assert len(special) == 2
  assert min(special) > 255


def test_split_character_becomes_a_replacement():
  assert _TOKENIZER.decode([0xC3, 259, 0xA9]) == '\ufffd<end>\ufffd'
