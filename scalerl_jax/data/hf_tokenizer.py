"""The tokenizer of a checkpoint of Hugging Face, and its chat template.

The text of a problem is not trusted: what it says in the words of a special
token stays text. `transformers` makes a special token of it, so that a problem
can end the user's message; on any other text the ids are the same. A token that
was added to the vocabulary without being called special is like any word.
"""

from collections.abc import Callable, Sequence
import json
import pathlib
from typing import Any

# A noncharacter: no template and no problem has a use for it.
_MARK = '\ufdd0'
_EXTRA = "pip install 'scalerl_jax[hf]'"
_FILES = ('generation_config.json', 'config.json')


class TokenizerError(ValueError):
  """A tokenizer that cannot be used as it is; the message is one line."""


class HfTokenizer:
  """A `tokenizer.json` with the stop tokens and the template beside it.

  Attributes:
    vocab_size: One more than the largest id.
    pad_id: The tokenizer's; 0 where it has none, which does no harm because
      padding is told by masks of its own.
    stop_ids: `eos_token_id` of `generation_config.json`, else that of
      `config.json`, else the `eos_token` of `tokenizer_config.json`.
  """

  def __init__(self, directory: str | pathlib.Path, *, chat: bool) -> None:
    """Reads the files.

    Args:
      directory: Holds `tokenizer.json` and, for the rest, the other files.
      chat: True: prompts are rendered with the chat template, which is that of
        `chat_template.jinja` or of `tokenizer_config.json`.

    Raises:
      TokenizerError: A file is missing or damaged, no stop token is named, a
        template is asked for that is not there or cannot be used, or a library
        is not installed.
    """
    self._directory = pathlib.Path(directory)
    # The second takes the names of special tokens for text.
    self._tokenizer, self._literal = self._load(), self._load()
    self._literal.encode_special_tokens = True
    added = self._tokenizer.get_added_tokens_decoder()
    self._special = {i for i, token in added.items() if token.special}
    settings = self._read('tokenizer_config.json')
    self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
    pad = self._tokenizer.token_to_id(_content(settings.get('pad_token')))
    self.pad_id = 0 if pad is None else pad
    self.stop_ids = self._find_stop_ids(settings)
    self._render: Callable[[str], str] | None = None
    if chat:
      self._render = self._compile(settings)
      self._before, self._after = self._surroundings()

  def encode(self, text: str) -> list[int]:
    """Turns trusted text into ids, and adds none.

    Args:
      text: Any text; the names of special tokens become their ids.

    Returns:
      Token ids.
    """
    ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
    return ids

  def encode_prompt(self, prompt: str) -> list[int]:
    """Renders the prompt of a problem.

    Args:
      prompt: Any text; the names of special tokens in it stay text, and spaces
        around it are cut off if it has any such name.

    Returns:
      Without a template, the ids of the text and those that the tokenizer puts
      around any text; with one, those of a conversation in which the user has
      said the text and the model is about to answer.

    Raises:
      TokenizerError: The template refuses the text.
    """
    if self._render is None:
      ids: list[int] = self._literal.encode(prompt).ids
      return ids
    ids = self.encode(self._render(prompt))
    if self._special_of(ids) == self._special_of(self._before + self._after):
      return ids
    inside = self._literal.encode(prompt.strip(), add_special_tokens=False).ids
    return [*self._before, *inside, *self._after]

  def decode(self, token_ids: Sequence[int]) -> str:
    """Turns ids into text.

    Args:
      token_ids: Ids; those that the tokenizer lacks are left out.

    Returns:
      Text, special tokens as their names; stop tokens are left out.
    """
    kept = [int(i) for i in token_ids if i not in self.stop_ids]
    text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
    return text

  def _load(self) -> Any:
    try:
      import tokenizers
    except ImportError:
      raise TokenizerError(
        f'{self._directory}: needs the library tokenizers: {_EXTRA}'
      ) from None
    path = self._directory / 'tokenizer.json'
    if not path.is_file():
      raise TokenizerError(
        f'{self._directory}: holds no tokenizer.json, the only form that is'
        ' read; transformers writes it'
      )
    try:
      tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
      # The library raises nothing more specific.
      raise TokenizerError(f'{path}: cannot be read: {error}') from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

  def _read(self, name: str) -> dict[str, Any]:
    """Content of a JSON file; nothing where it is not there."""
    path = self._directory / name
    if not path.is_file():
      return {}
    try:
      value = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as error:
      raise TokenizerError(f'{path}: cannot be read: {error}') from None
    if not isinstance(value, dict):
      raise TokenizerError(f'{path}: must hold a JSON object')
    return value

  def _find_stop_ids(self, settings: dict[str, Any]) -> tuple[int, ...]:
    found = [self._read(name).get('eos_token_id') for name in _FILES]
    named = _content(settings.get('eos_token'))
    found.append(self._tokenizer.token_to_id(named))
    value = next((v for v in found if v is not None), None)
    ids = value if isinstance(value, list) else [value]
    known = range(self.vocab_size)
    if not ids or any(type(i) is not int or i not in known for i in ids):
      raise TokenizerError(
        f'{self._directory}: eos_token_id={value!r} must be one or several of'
        f' the {self.vocab_size} ids; give it in {_FILES[0]}'
      )
    return tuple(dict.fromkeys(ids))

  def _compile(self, settings: dict[str, Any]) -> Callable[[str], str]:
    try:
      import jinja2
      from jinja2 import sandbox
    except ImportError:
      raise TokenizerError(
        f'data.chat=True needs the library jinja2: {_EXTRA}'
      ) from None
    path = self._directory / 'chat_template.jinja'
    source = settings.get('chat_template')
    if path.is_file():
      source = path.read_text(encoding='utf-8')
    if isinstance(source, list):  # Several, by name.
      source = {t.get('name'): t.get('template') for t in source}.get('default')
    if not isinstance(source, str):
      raise TokenizerError(
        f'{self._directory}: has no chat template, neither in {path.name} nor'
        ' in tokenizer_config.json; give one or set data.chat=False'
      )

    def fail(message: str) -> None:
      raise jinja2.TemplateError(message)

    names = {
      name: _content(value)
      for name, value in settings.items()
      if name.endswith('_token') and value is not None
    }
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols'],
    )
    environment.globals['raise_exception'] = fail
    try:
      template = environment.from_string(source)
    except jinja2.TemplateError as error:
      raise TokenizerError(
        f'{self._directory}: the chat template cannot be parsed: {error}'
      ) from None

    def render(prompt: str) -> str:
      message = {'role': 'user', 'content': prompt}
      try:
        # There is no clock: a prompt is the same on every day.
        return template.render(
          messages=[message], add_generation_prompt=True, **names
        )
      except Exception as error:
        # A template is a program: whatever it raises is its fault.
        raise TokenizerError(
          f'{self._directory}: the chat template fails for one message of a'
          f' user: {error}'
        ) from None

    return render

  def _surroundings(self) -> tuple[list[int], list[int]]:
    """What a template puts before and after the text of the user."""
    assert self._render is not None
    parts = self._render(_MARK).split(_MARK)
    if len(parts) != 2:
      raise TokenizerError(
        f"{self._directory}: the chat template shows the user's message"
        f' {len(parts) - 1} times, not once'
      )
    return self.encode(parts[0]), self.encode(parts[1])

  def _special_of(self, ids: Sequence[int]) -> list[int]:
    return [i for i in ids if i in self._special]


def _content(token: Any) -> str:
  """Of a token that is given by its text, or by a record of it."""
  found = token.get('content') if isinstance(token, dict) else token
  return found if isinstance(found, str) else ''
