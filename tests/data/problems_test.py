import json

import pytest

from scalerl_jax import data
from scalerl_jax import records


def _row(**changes):
  row = {
    'problem_id': 'a',
    'prompt': '4+8=',
    'answer': '2',
    'verifier': 'integer',
  }
  return row | changes


def _write(tmp_path, *rows):
  path = tmp_path / 'problems.jsonl'
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  path.write_text('\n'.join(lines), encoding='utf-8')
  return path


def _problem(problem_id, prompt):
  return records.Problem(
    problem_id=problem_id, prompt=prompt, answer='1', verifier='integer'
  )


def test_reads_in_order_past_blank_lines_and_extra_fields(tmp_path):
  path = _write(tmp_path, _row(), '', _row(problem_id='b', source='x'), '')
  problems = data.read_problems(path)
  assert [p.problem_id for p in problems] == ['a', 'b']
  assert problems[0] == records.Problem(**_row())


def test_byte_order_mark_and_line_separators_are_harmless(tmp_path):
  path = tmp_path / 'problems.jsonl'
  row = json.dumps(_row(prompt='a\u2028b'), ensure_ascii=False)
  path.write_bytes(b'\xef\xbb\xbf' + row.encode() + b'\r\n')
  assert data.read_problems(path)[0].prompt == 'a\u2028b'


@pytest.mark.parametrize(
  ('bad', 'message'),
  [
    ('{"problem_id": ', 'not valid JSON'),
    ('[1]', 'must be a JSON object, got list'),
    ('null', 'must be a JSON object, got NoneType'),
    ('[' * 100_000, 'not valid JSON'),
    (_row(problem_id='b', answer=2), "field 'answer'"),
    (_row(problem_id='b', prompt='  '), "field 'prompt'"),
    ({'problem_id': 'b'}, "field 'prompt'"),
    (_row(), 'already on line 1'),
    (_row(problem_id='b', verifier='judge'), "'judge' must be one of"),
    (_row(problem_id='b', prompt='1' * 9), 'prompt of 9 tokens exceeds'),
  ],
)
def test_bad_line_is_named(tmp_path, bad, message):
  path = _write(tmp_path, _row(), bad)
  with pytest.raises(data.DataError) as caught:
    data.read_problems(
      path, tokenizer=data.ByteTokenizer(), max_prompt_tokens=8
    )
  assert str(caught.value).startswith(f'{path}:2: ')
  assert message in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('verifier', 'answer'), [('integer', 'seven'), ('integer', '1/2')]
)
def test_v08_answer_that_cannot_be_parsed_is_rejected(
  tmp_path, verifier, answer
):
  path = _write(tmp_path, _row(verifier=verifier, answer=answer))
  with pytest.raises(data.DataError, match=r':1: .*cannot parse the answer'):
    data.read_problems(path)


@pytest.mark.parametrize('text', ['', '\n \n'])
def test_empty_file(tmp_path, text):
  with pytest.raises(data.DataError, match='holds no problem'):
    data.read_problems(_write(tmp_path, text))


def test_missing_file_and_directory(tmp_path):
  for path in (tmp_path / 'missing.jsonl', tmp_path):
    with pytest.raises(data.DataError, match='cannot be read'):
      data.read_problems(path)


def test_file_that_is_not_utf8(tmp_path):
  path = tmp_path / 'problems.jsonl'
  path.write_bytes(b'{"a": "\xff"}')
  with pytest.raises(data.DataError, match='not UTF-8'):
    data.read_problems(path)


def test_r03_fingerprint_sees_content_and_order():
  a, b = _problem('a', '1='), _problem('b', '2=')
  digest = data.fingerprint([a, b])
  assert digest == data.fingerprint([_problem('a', '1='), b])
  assert digest != data.fingerprint([b, a])
  assert digest != data.fingerprint([a, _problem('b', '3=')])


@pytest.mark.parametrize(
  ('held_out', 'field'),
  [(_problem('a', '2='), 'problem_id'), (_problem('b', '1='), 'prompt')],
)
def test_overlap_of_train_and_held_out_is_refused(held_out, field):
  train = [_problem('a', '1='), _problem('c', '3=')]
  data.check_disjoint(train, [_problem('d', '4=')])
  with pytest.raises(data.DataError, match=f'same {field}'):
    data.check_disjoint(train, [held_out])
