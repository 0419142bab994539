"""Pages that can be mailed: one HTML file, no script, no link outside."""

from collections.abc import Sequence
import html
import re
from typing import Any

_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]')
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;
padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}
td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}
.grid{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0}
svg{max-width:100%;height:auto}
pre{background:#f6f6f6;padding:.6em;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:24em;overflow:auto}
.warning{background:#fff3cd;padding:.5em 1em;border-left:4px solid #e0a800}
figcaption{font-weight:600}
"""


def page(title: str, sections: Sequence[str]) -> str:
  """Makes a page.

  Args:
    title: Its title, as text.
    sections: HTML; empty ones are left out.

  Returns:
    The page, which can be encoded whatever it holds.
  """
  name = html.escape(title)
  text = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f'<title>{name}</title><style>{_STYLE}</style></head>\n'
    f'<body><h1>{name}</h1>\n' + '\n'.join(filter(None, sections)) + '\n'
    '</body></html>\n'
  )
  # Half a surrogate pair in a sample must not cost the report, nor may text of
  # the data turn the direction of what follows.
  text = text.encode('utf-8', 'replace').decode('utf-8')
  return _CONTROL.sub('?', text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Makes a table.

  Args:
    header: Names of the columns, as text.
    rows: Cells, as text.

  Returns:
    A `<table>` element.
  """
  head = ''.join(f'<th>{html.escape(h)}</th>' for h in header)
  body = ''.join(
    '<tr>' + ''.join(f'<td>{html.escape(c)}</td>' for c in row) + '</tr>'
    for row in rows
  )
  return f'<table><tr>{head}</tr>{body}</table>'


def warnings(lines: Sequence[Any]) -> str:
  """Makes paragraphs that stand out.

  Args:
    lines: Of any type; shown as text.

  Returns:
    A `<p>` element for each.
  """
  return ''.join(
    f'<p class="warning">{html.escape(str(line))}</p>' for line in lines
  )


def shortened(text: str, limit: int) -> str:
  """Cuts a text that is too long, and shows that it is cut.

  Args:
    text: Any.
    limit: Characters that may be left.

  Returns:
    The text, or its beginning and three dots.
  """
  return text if len(text) <= limit else text[: limit - 3] + '...'


def number(value: Any) -> str:
  """Shows a value.

  Args:
    value: None, a number or anything else.

  Returns:
    Floats with four significant digits, `–` for None.
  """
  if value is None:
    return '–'
  if not isinstance(value, float):
    return str(value)
  # Rounded first: 10529.2 is 10530 rather than 1.053e+04.
  return f'{float(f"{value:.4g}"):g}'
