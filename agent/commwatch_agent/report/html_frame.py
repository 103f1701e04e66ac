"""The frame of all our HTML pages: light and dark, without external resources."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from commwatch_agent.text.terminal_text import clean

if TYPE_CHECKING:
    from markdown_it.token import Token

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
:is(.operations, .parts, .changes, .kinds) td:first-child { overflow-wrap: anywhere; min-width: 6rem }
.kinds :is(th, td):nth-child(n) { white-space: normal }
.numbers, figure table { font-variant-numeric: tabular-nums }
div { overflow-x: auto }
pre { white-space: pre-wrap }
@media (max-width: 40rem) {
  th, td { padding: .25rem .4rem }
  .ranks :is(th, td):is(:nth-child(3), :nth-child(4)) { display: none }
  .operations :is(th, td):is(:nth-child(3), :nth-child(4), :nth-child(5), :nth-child(7), :nth-child(8)) { display: none }
  .parts :is(th, td):nth-child(n+3):nth-last-child(n+4) { display: none }
  .changes :is(th, td):is(:nth-child(3), :nth-child(6)) { display: none }
  .kinds :is(th, td):is(:nth-child(4), :nth-child(6), :nth-child(7), :nth-child(9)) { display: none }
  .kinds td:nth-child(3) { white-space: nowrap }
  .kinds td:nth-child(5) { min-width: 4.6rem }
  .operations td:last-child { white-space: normal }
  .numbers { font-size: .72rem }
  .numbers :is(th, td) { padding: .25rem }
  .operations :is(th, td):nth-child(n) { padding: .25rem .1rem }
  :is(.operations, .parts, .changes, .kinds) td:first-child { min-width: 4.2rem }
  .operations td:nth-child(2) { overflow-wrap: anywhere; min-width: 4.3rem }
  table:not(.numbers) :is(th, td) { overflow-wrap: anywhere }
  div:has(> :is(.ranks, .operations, .parts, .changes, .kinds))::after { content: "A wider window shows more columns."; font-size: .8rem }
}
code { background: #8882; padding: 0 .2em; overflow-wrap: anywhere }
pre code { display: block; padding: .5rem .75rem }
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


def prose(markdown: str) -> str:
    """Return a page of a Markdown text, whose first heading is the title; the other headings have anchors as on GitHub.

    Links to other files lead nowhere from this page, so only their text stays.
    """
    from markdown_it import MarkdownIt  # for one page that is rarely asked for, not for the memory of every agent

    first, _, rest = markdown.partition("\n")
    reader = MarkdownIt("js-default")
    tokens = reader.parse(rest)
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", re.sub(r"[^\w\- ]", "", content.content.lower()).replace(" ", "-"))
        content.children = list(_with_links_of_the_page(content.children or ()))
    return page(first.lstrip("# "), reader.renderer.render(tokens, reader.options, {}))


def _with_links_of_the_page(tokens: Iterable[Token]) -> Iterator[Token]:
    """Yield the parts of a paragraph without links to other files; links are not nested."""
    leads = True
    for token in tokens:
        if token.type == "link_open":
            leads = str(token.attrGet("href")).startswith(("#", "http://", "https://"))
        if leads or not token.type.startswith("link_"):
            yield token
