"""The short ways through a log change no result: the account equals that of a slow, plain reading."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.beside.form import Form
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.forms import FORMS
from commwatch_collectors.nccl.input.lines import Lines
from commwatch_collectors.nccl.search import read
from tests.collectors.nccl import reference
from tests.collectors.nccl.test_fuzz import FIXTURES, LINES, cut, glued, line, mutated
from tests.collectors.nccl.test_labels import CORPUS
from tests.helpers import examples

LOGS = [*FIXTURES, *(path.with_suffix(".log") for path in CORPUS)]


def check(data: bytes, most_facts: int = 500_000, *at: int) -> None:
    """Read ``data``, which comes in pieces, in both ways, and compare all that is kept."""
    account, lines = Account(most_facts), Lines()
    places = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    for first, last in pairwise(places):
        account.add_lines(lines.feed(data[first:last]), "log")
    account.add_lines(lines.end(), "log")
    plain = reference.PlainAccount(most_facts)
    for number, text in reference.lines_of(data):
        plain.add(text, "log", number)
    assert reference.contents(account) == reference.contents(plain)
    assert [asdict(found) for found in findings(account)] == [asdict(found) for found in findings(plain)]


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_recorded_logs(log: Path) -> None:
    """Every recorded log gives the facts, counts, samples and findings of the slow reading."""
    check(log.read_bytes()[:150_000])


timed = st.builds(
    lambda text, at: b"[2025-01-02 03:04:05] " + text if at else text.replace(b"NCCL INFO ", b"NCCL INFO [2] ", 1),
    line,
    st.booleans(),
)
part = line | cut | glued | mutated() | timed | st.binary(max_size=60) | st.sampled_from([b"", b"\r", b"x\x1b[0m"])


@given(
    st.lists(part, max_size=30).flatmap(lambda parts: st.lists(st.sampled_from(parts or [b""]), max_size=80)),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([3, 50, 10_000]),
    st.lists(st.integers(0, 20_000), max_size=4),
)
@examples(200)
def test_any_log(lines: list[bytes], newline: bytes, most_facts: int, at: list[int]) -> None:
    """Cut, glued, mutated, timed and repeated lines, however the stream is cut, give what the slow reading gives."""
    check(newline.join(lines), most_facts, *at)


@given(st.permutations(LINES), st.integers(0, 10))
@examples(15)
def test_processes_in_turn(lines: list[bytes], times: int) -> None:
    """Lines of all logs in any order, some twice, give what the slow reading gives."""
    check(b"\n".join([*lines, *lines[: 20 * times]]))


@given(
    st.sampled_from(FORMS), st.text(alphabet="0123456789abcdefx -", max_size=12), st.text(alphabet="0ax >", max_size=8)
)
@examples(300)
def test_needles_survive(form: Form, before: str, after: str) -> None:
    """Digits and addresses beside a needle never hide it: the facts are those of all patterns."""
    text = before + form.needle + after
    assert read(text) == tuple(reference.facts_of(text))
