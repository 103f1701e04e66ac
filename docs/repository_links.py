"""A hook of MkDocs: the files outside ``docs`` to which documents link are part of the site, too.

On GitHub a document links to ``../alerts/commwatch_alerts/runbook.md``. The site has no folder above ``docs``, so there the runbook is
``repository/alerts/commwatch_alerts/runbook.md``, and the links from it and to it are rewritten. README.md is the site's first page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: The target of a Markdown link to a file, without the anchor.
TARGET = re.compile(r"(?<=\]\()[^)#\s:]+(?=(?:#[^)\s]*)?\))")


def in_site(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def in_repository(uri: str) -> str:
    """Return the file of the repository that is at ``uri`` in the site."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def targets(text: str, source: str) -> list[str]:
    """Return the files of the repository to which ``text``, the document ``source``, links."""
    return [normpath(join(dirname(source), link)) for link in TARGET.findall(text)]


def rewritten(text: str, source: str) -> str:
    """Return ``text``, the document ``source``, with links that are right in the site."""
    here = dirname(in_site(source)) or "."
    return TARGET.sub(lambda link: relpath(in_site(normpath(join(dirname(source), link[0]))), here), text)


def outside(documents: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return README.md, and the other files outside ``docs`` to which it and ``documents`` link, directly or through such a file."""
    waiting, found = [*documents, "README.md"], ["README.md"]
    while waiting:
        source = waiting.pop()
        for target in targets((root / source).read_text(encoding="utf-8"), source):
            if not target.startswith("docs/") and target not in found and (root / target).is_file():
                found.append(target)
                if target.endswith(".md"):
                    waiting.append(target)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs`` to the site."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in outside(f"docs/{page.src_uri}" for page in files.documentation_pages()):
        files.append(
            File.generated(config, in_site(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return rewritten(markdown, in_repository(page.file.src_uri))
