"""The one frame of our HTML pages: self-contained, light and dark, nothing from elsewhere."""

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top }
.numbers th:nth-child(n+3), .numbers td:nth-child(n+3) { text-align: right; white-space: nowrap }
div { overflow-x: auto }
pre { white-space: pre-wrap }
code { background: #8882; padding: 0 .2em }
"""


def page(title: str, body: str, style: str = "") -> str:
    """A whole document; ``body`` is HTML and ``style`` CSS already, ``title`` is not."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en">{head}<style>{_STYLE}{style}</style>\n<h1>{escape(title)}</h1>\n{body}\n</html>\n'


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], kind: str = "") -> str:
    """A table of plain texts; class ``numbers`` aligns all but the first two columns right."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}" for cell in head)] if head else []
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    return f'<div><table class="{kind}">' + "\n".join(lines) + "</table></div>"


def prose(title: str, markdown: str) -> str:
    """A page of a text in Markdown: its sections under headings that can be linked to, else as it is written."""
    body = []
    for section in markdown.split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        body.append(f'<h2 id="{escape(name.lower())}">{escape(name)}</h2>\n<pre>{escape(text.strip())}</pre>')
    return page(title, "\n".join(body))
