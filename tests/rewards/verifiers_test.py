import pytest

from scalerl_jax import rewards
from scalerl_jax.rewards import verifiers


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('<think>4+8=2\n</think>7<end>', 1),
    ('</think> 7 ', 1),
    ('</think>+07<end>', 1),
    ('</think>7<end>8', 1),
    ('</think>8</think>7<end>', 1),
    ('</think>-7<end>', -1),
    ('</think>7 7<end>', -1),
    ('</think>7.0<end>', -1),
    ('</think>07 or 8<end>', -1),
    ('</think><end>7', -1),
    ('</think>', -1),
    ('<think>7', -1),
    ('7<end>', -1),
    ('', -1),
    ('</think>' + '7' * 5000, -1),
    ('</think>__import__("os")', -1),
  ],
)
def test_integer(response, expected):
  assert rewards.VERIFIERS['integer'].reward(response, '7') == expected


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('7', 1),
    ('7 times 1 is 7.', 1),
    ('10-3=7!', 1),
    ('= +07', 1),
    ('8</think>so 7', 1),
    ('7, not 8', -1),
    ('-7', -1),
    ('1,007', -1),
    ('7.0', -1),
    ('7.5', -1),
    ('7</think><end>', -1),
    ('seven', -1),
    ('', -1),
    ('7' * 5000, -1),
  ],
)
def test_last_integer(response, expected):
  assert rewards.VERIFIERS['last_integer'].reward(response, '7') == expected


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('</think> x y \n<end>', 1),
    ('</think>x  y<end>', -1),
    ('</think><end>', -1),
    ('x y', -1),
  ],
)
def test_exact(response, expected):
  assert rewards.VERIFIERS['exact'].reward(response, ' x y') == expected


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    (r'\boxed{7}', '7'),
    (r'\boxed{ \frac{1}{2} }', r'\frac{1}{2}'),
    (r'\boxed{1} and \boxed{2}', '2'),
    (r'\boxed{1} and \boxed{2', '1'),
    (r'\boxed{\boxed{3}}', '3'),
    (r'\boxed{}', ''),
    (r'\boxed 7', None),
    ('7', None),
  ],
)
def test_v05_last_box_keeps_inner_braces(text, expected):
  assert verifiers.last_box(text) == expected


@pytest.mark.parametrize('response', ['7', '</think>7<end>', r'\boxed{}', ''])
def test_v06_no_box_is_wrong(response):
  assert rewards.VERIFIERS['boxed'].reward(response, '7') == -1


def test_v05_boxed_answer_is_rewarded():
  verifier = rewards.VERIFIERS['boxed']
  response = r'so \boxed{\frac{1}{2}}<end>'
  assert verifier.reward(response, r'\frac{1}{2}') == 1
  assert verifier.reward(response, r'\frac{1}{3}') == -1


@pytest.mark.parametrize('name', sorted(rewards.VERIFIERS))
def test_v08_blank_answer_cannot_be_parsed(name):
  for answer in ('', '  '):
    with pytest.raises(ValueError, match=r'empty|not an integer'):
      rewards.VERIFIERS[name].parse(answer)
