"""Every warning in the sources of NCCL, RCCL and aws-ofi-nccl that a user can cause or mend has a class and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commwatch_collectors.nccl.vocabulary.known import words_for
from commwatch_collectors.nccl.vocabulary.places import subsystem
from commwatch_collectors.nccl.vocabulary.words import KINDS
from tests.collectors.nccl.sites import Site, sites, text_of

ROOT = Path(__file__).parents[3]
LISTS = sorted((ROOT / "tests/fixtures/nccl/sites").glob("*.tsv"))
INTERNAL = "internal"


def rows(path: Path) -> list[tuple[str, str, str]]:
    """The sites of a list: file, format string, class."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(file, call, kind) for file, call, kind in (line.split("\t") for line in lines if line[:1] != "#")]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_sites(path: Path) -> None:
    """A site that a user can cause or mend has its class and a remedy; others are internal, and have their file's subsystem."""
    found = rows(path)
    assert len(set(found)) == len(found) > 400
    wrong = []
    for file, call, kind in found:
        words = words_for(text_of(call), f"{file}:7")
        known = words.kind if words is not None else INTERNAL
        if kind not in KINDS or known != kind or not subsystem(f"{file}:7")[1]:
            wrong.append((file, call, kind, known))
    assert wrong == []


def test_counts_are_documented() -> None:
    """The document names the versions, and how many of their warnings there are, have a class, and are internal."""
    text = (ROOT / "docs/nccl.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| (\S+ \d[\d.]+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE))
    counted = set()
    for path in LISTS:
        found = rows(path)
        internal = sum(kind == INTERNAL for _, _, kind in found)
        name, _, version = path.stem.rpartition("-")
        shown = name if name.startswith("aws") else name.upper()
        counted.add((f"{shown} {version}", str(len(found)), str(len(found) - internal), str(internal)))
    assert documented == counted


SOURCE = r"""
#define OPEN_CHECK(call, name) if (call) { WARN("Call to " name " failed: %s", strerror(errno)); }
#define PLAIN_CHECK(call) if (call) WARN("Plain failure %d", \
  call)
static const char* fatal = "Fatal: one thing";
// WARN("in a comment");
void f(int a) {
  OPEN_CHECK(open(g(1, 2), "x"), "open");
  PLAIN_CHECK(a);
  WARN("One %s"
       " and %" PRIu64 ", \"two\"\nnext line", name, (uint64_t)a);
  WARN("%s", fatal);
  WARN("One %s" " and %" PRIu64 ", \"two\"", name, 3);
  NOWARN("not this");
}
"""


def test_sites_are_found(tmp_path: Path) -> None:
    """The list of a checkout has each warning once, with the words of macros, and none of comments, tests and Windows."""
    for name in ("a/b.cc", "tests/t.cc", "os/windows.cc", "note.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(SOURCE)
    assert sites(tmp_path) == [
        Site("a/b.cc", call)
        for call in ("Call to open failed: %s", "Plain failure %d", 'One %s and %u, "two"', "Fatal: one thing")
    ]


def test_text_of() -> None:
    """A format string is instantiated with plausible values."""
    assert text_of("a %5.1f%% of %s at %p, %ld") == "a 1.5% of name at 0x7f00, 3"
