"""Whatever comes as a log is read: no line makes the account or what follows from it raise, and all of it is JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.input.lines import Lines
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.text import clean
from commwatch_collectors.nccl.topology import choices, hosts, views
from tests.helpers import examples

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures/nccl").glob("*.log"))
LINES = [line for path in FIXTURES for line in path.read_bytes().split(b"\n") if line.strip()]

CASES = sorted((Path(__file__).parents[2] / "fixtures/nccl/findings").glob("*.txt"))
TROUBLE = [text[2:] for path in CASES for text in path.read_bytes().split(b"\n") if text[:2] in (b"  ", b"> ")]

line = st.sampled_from(LINES) | st.sampled_from(TROUBLE)
cut = st.builds(
    lambda text, a, b: text[a % (len(text) + 1) :][: b % (len(text) + 1)],
    line,
    st.integers(0, 500),
    st.integers(0, 500),
)
glued = st.lists(cut | line, min_size=1, max_size=4).map(b"".join)
#: A number elsewhere than it was, or one that is none.
NUMBERS = [
    b"0",
    b"-1",
    b"18446744073709551615",
    b"9223372036854775807",
    b"9" * 5000,
    b"1.2.3",
    b"1e99",
    b"..",
    "\u0663\u0664".encode(),
    b"",
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A line of which one run of digits is another, or some bytes are."""
    text = draw(line)
    places = [at for at in range(len(text)) if text[at : at + 1].isdigit()]
    at = draw(st.sampled_from([*places, draw(st.integers(0, len(text)))]))
    return text[:at] + draw(st.sampled_from(NUMBERS) | st.binary(max_size=4)) + text[at + draw(st.integers(0, 3)) :]


def read(data: bytes, most_facts: int) -> Account:
    account, lines = Account(most_facts), Lines()
    for found in (lines.feed(data), lines.end()):
        account.add_lines(found, "log")
    return account


@given(st.lists(line | cut | glued | mutated() | st.binary(max_size=60), max_size=40), st.sampled_from([3, 50, 10_000]))
@examples(150)
def test_any_log(parts: list[bytes], most_facts: int) -> None:
    """Cut, shuffled, glued, mutated and binary lines are counted, and what they say is JSON without NaN or infinity."""
    data = b"\n".join(parts)
    account = read(data, most_facts)
    found = labels(account)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    told = [[asdict(each) for each in made(account)] for made in (findings, views, hosts, choices)]
    json.dumps(told, allow_nan=False)
    if most_facts == 10_000:
        assert not account.overflow
    lines = data.replace(b"\0", b"").decode("utf-8", "replace").split("\n")
    assert account.n_lines == len(lines) - (not lines[-1])
    for level, key in (("INFO", "n_info"), ("WARN", "n_warn"), ("CALL", "n_call")):
        words = re.compile(rf"NCCL {level}(?![A-Z])")
        assert found.get(key, 0) == sum(len(words.findall(clean(line))) for line in lines)


@given(st.permutations(range(len(LINES))))
@examples(30)
def test_order_of_lines(order: list[int]) -> None:
    """Shuffled lines give the same messages; only what belongs to which communicator may change."""
    shuffled = labels(read(b"\n".join(LINES[at] for at in order), 10_000))
    plain = labels(read(b"\n".join(LINES), 10_000))
    for key in (
        "n_info",
        "n_warn",
        "n_call",
        "hosts",
        "n_processes",
        "init_start",
        "init_complete",
        "ring_lines",
        "gdrdma",
    ):
        assert shuffled[key] == plain[key]


def test_no_room() -> None:
    """Wherever the room for facts runs out, the rest can still be evaluated."""
    data = b"\n".join([*LINES, *TROUBLE])
    for most_facts in [*range(60), *range(60, 600, 30)]:
        account = read(data, most_facts)
        assert account.overflow
        told = [[asdict(each) for each in made(account)] for made in (findings, views, hosts, choices)]
        assert json.dumps([told, labels(account)], allow_nan=False)
