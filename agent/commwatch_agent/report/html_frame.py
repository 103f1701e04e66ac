"""The frame of all our HTML pages: light and dark, without external resources."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from commwatch_agent.core.terminal_text import clean

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2rem 0 .25rem }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; overflow-wrap: anywhere }
p { margin: .5rem 0 }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; max-width: 28rem }
tbody th + td { max-width: 44rem }
thead th, tbody th { font-weight: 600 }
.numbers th:nth-child(n+3), .numbers td:nth-child(n+3) { text-align: right; white-space: nowrap }
.numbers, figure table { font-variant-numeric: tabular-nums }
div { overflow-x: auto }
pre { white-space: pre-wrap }
code { background: #8882; padding: 0 .2em; overflow-wrap: anywhere }
"""
#: Hash of the style for a Content-Security-Policy.
STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()


def text(plain: str) -> str:
    """Return foreign text as HTML: markup is escaped; invisible characters and direction changes are replaced."""
    return escape("\n".join(map(clean, plain.split("\n"))))


def page(title: str, body: str, style: str = "") -> str:
    """Return a whole HTML document; ``body`` is HTML, ``style`` is CSS, ``title`` is plain text."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
    main = f"<main><h1>{text(title)}</h1>\n{body}\n</main>"
    return f'<!doctype html>\n<html lang="en">{head}<style>{_STYLE}{style}</style>\n{main}</html>\n'


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], kind: str = "") -> str:
    """Return a table of plain texts, empty without rows; class ``numbers`` aligns all but the first two columns right.

    Without a head, the first column holds the headings of the rows.
    """
    if not rows:
        return ""
    lines = ["<thead><tr>" + "".join(f'<th scope="col">{text(cell)}' for cell in head) + "</thead>"] if head else []
    lines.append("<tbody>")
    for first, *rest in rows:
        name = f"<td>{text(first)}" if head else f'<th scope="row">{text(first)}'
        lines.append(f"<tr>{name}" + "".join(f"<td>{text(cell)}" for cell in rest))
    return f'<div><table class="{kind}">' + "\n".join(lines) + "</table></div>"


def prose(title: str, markdown: str) -> str:
    """Return a page of the sections (``##``) of a Markdown text: headings get anchors, the rest stays as written."""
    body = []
    for section in markdown.split("\n## ")[1:]:
        name, _, content = section.partition("\n")
        body.append(f'<h2 id="{text(name.lower())}">{text(name)}</h2>\n<pre>{text(content.strip())}</pre>')
    return page(title, "\n".join(body))
