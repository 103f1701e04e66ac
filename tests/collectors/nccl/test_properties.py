"""What a log is put through on its way changes no conclusion: prefixes, JSON, wrapped lines, processes and files in any order.

``cut_output`` and ``mixed_output`` are left out: they are about the form of the text, which changes here. So is whether a log ends
within an init, which is known from the number of its lines.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.input.lines import lines_of, split_lines
from commwatch_collectors.nccl.text import parse_line
from tests.collectors.nccl.test_findings import ALL

T = TypeVar("T")
NCCL = Path(__file__).parents[2] / "fixtures" / "nccl"
PATHS = [*sorted(NCCL.glob("*.log")), *sorted(NCCL.glob("wild/*.log"))]
#: By name, the lines of each, which are no longer wrapped or in JSON.
LOGS: dict[str, list[str]] = {
    **{path.stem: [text for _, text in split_lines(lines_of(io.BytesIO(path.read_bytes())))] for path in PATHS},
    **{f"{case.kind}-{case.number}": case.lines for case in ALL},
}
Conclusions = set[tuple[str, str]]
#: A test looks at so many logs: one test for each would cost more than what it does.
TOGETHER = 20
BATCHES = [list(LOGS)[at : at + TOGETHER] for at in range(0, len(LOGS), TOGETHER)]
logs = pytest.mark.parametrize("names", BATCHES, ids=lambda names: f"{names[0]}..{names[-1]}")
#: Of the prefixes, widths or seeds, ``make test`` takes one in so many for each log, in turn; ``make test-long`` takes all.
one_in_four, one_in_three = (
    pytest.mark.parametrize("one_in", [number, pytest.param(1, marks=pytest.mark.long)]) for number in (4, 3)
)
NUMBER_OF = {name: at for at, name in enumerate(LOGS)}


def each(names: list[str], check: Callable[[str], None]) -> None:
    """Check all of these logs, and raise the failures of all."""
    failures = []
    for name in names:
        try:
            check(name)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


def some_of(choices: Sequence[T], name: str, one_in: int) -> Sequence[T]:
    """Of what is tried with each log, those for this one."""
    return choices[NUMBER_OF[name] % one_in :: one_in]


@cache
def as_it_is(name: str) -> Conclusions:
    """What is concluded of a log."""
    return concluded(LOGS[name])


def concluded(*files: Iterable[str]) -> Conclusions:
    """Name and text of the findings of these files."""
    account = Account()
    for number, lines in enumerate(files):
        account.add_lines(lines_of(io.BytesIO("\n".join(lines).encode())), f"{number}.log")
    return {
        (found.name, found.says)
        for found in findings(account)
        if found.name not in ("cut_output", "mixed_output")
        and not found.says.endswith(("none had finished when the log ended", "began an init and did not finish it"))
    }


def without_order(conclusions: Conclusions) -> Conclusions:
    """Without the numbers and addresses, which are those of the first of several similar lines, and without what came before a time-out.

    A launcher ends all processes after a time-out, so what it reports is a cause only if it came before.
    """
    late = any(name == "watchdog_timeout" for name, _ in conclusions)
    return {
        (name, re.sub(r"\S*<\d+>|0x[0-9a-f]+|\d+", "#", says.partition("; before it, ")[0]))
        for name, says in conclusions
        if not (late and name == "process_failed")
    }


PREFIXES = [
    "[2026-01-02 03:04:05,678] [INFO] [launch.py:300:main] ", "2026-01-02 03:04:05,678 - train - INFO - ", "INFO:train.run:", "12:",
    "2026-01-02 03:04:05.678 | INFO     | train.run:<module>:12 - ", "<134>1 2026-01-02T03:04:05Z node-1 train 812 - - ", "    12\t",
    "train-0 pytorch ", "[train-0 pytorch] ", "job.log:12:", "- ", "* ", "1. ", "INFO 01-02 03:04:05 [worker.py:70] ", "> ",
    "[2026-01-02 03:04:05 TP0] ", "2026-01-02T03:04:05.123Z ", "2026-01-02T03:04:05Z stdout F ", "Jan  5 09:10:11 node-1 train[812]: ",
]  # fmt: skip


def with_json(line: str) -> str:
    """A record of Docker's."""
    return json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"})


@one_in_four
@logs
def test_prefixes(names: list[str], one_in: int) -> None:
    """A prefix that is the same on all lines, or a record around each, changes no conclusion."""

    def check(name: str) -> None:
        expected = as_it_is(name)
        for prefix in some_of(PREFIXES, name, one_in):
            found = concluded(prefix + line if line else line for line in LOGS[name])
            # The prefix may be the only mark of who raised an exception.
            assert {
                (kind, re.sub(r"; raised by (?:train-0 pytorch|job\.log|TP0)$", "", says)) for kind, says in found
            } == expected, prefix
        assert concluded(map(with_json, LOGS[name])) == expected

    each(names, check)


def cut(line: str, width: int) -> list[str]:
    """A line as a terminal wraps it."""
    return [line[at : at + width] for at in range(0, len(line) or 1, width)]


def cut_at_blanks(line: str, width: int) -> list[str]:
    """A line as a tracker wraps it."""
    found = [""]
    for word in line.split(" "):
        if len(found[-1]) + 1 + len(word) > width and found[-1]:
            found.append(word)
        else:
            found[-1] += (" " if found[-1] else "") + word
    return found


@one_in_three
@logs
@pytest.mark.parametrize("wrap", [cut, cut_at_blanks])
def test_wrapped(names: list[str], wrap: Callable[[str, int], list[str]], one_in: int) -> None:
    """Lines wrapped at a usual width change no conclusion."""

    def check(name: str) -> None:
        for width in some_of((80, 100, 132), name, one_in):
            wrapped = [wrap(line, width) for line in LOGS[name]]
            full = [part for parts in wrapped for part in parts[:-1] if not part.endswith(".")]
            if wrap is cut_at_blanks and ({len(part) for part in full} <= {width, width - 1} or name == "nccl-2.7"):
                continue  # nothing shows whether these lines were cut within a word, ended, or are the rest of a torn line
            assert concluded(part for parts in wrapped for part in parts) == as_it_is(name), width
            if wrap is cut and width == 132:  # some reports are read within so many lines
                assert concluded(part for line in LOGS[name] for part in cut(with_json(line), width)) == as_it_is(name)

    each(names, check)


def by_process(lines: list[str]) -> list[list[str]]:
    """The lines of each process, with the other lines behind them; or those of each rank of PyTorch if it has all lines."""
    found: dict[object, list[str]] = {}
    speakers: list[object] = [parse_line(line)[0].head.process for line in lines]
    if not any(speakers):
        speakers = [(re.match(r"\[rank\d+\]", line) or [None])[0] for line in lines]
        speakers = speakers if all(speakers) else [None] * len(lines)
    latest = next(filter(None, speakers), None)
    for line, speaker in zip(lines, speakers, strict=True):
        latest = speaker or latest
        found.setdefault(latest, []).append(line)
    return list(found.values())


@one_in_three
@logs
def test_interleaved(names: list[str], one_in: int) -> None:
    """Processes that print at other times, each its lines in their order, change no conclusion."""

    def check(name: str) -> None:
        for seed in some_of(range(3), name, one_in):
            left, mixed, chance = by_process(LOGS[name]), list[str](), Random(seed)
            while left := [lines for lines in left if lines]:
                mixed.append(chance.choice(left).pop(0))
            assert without_order(concluded(mixed)) == without_order(as_it_is(name))

    each(names, check)


@one_in_three
@logs
def test_files_in_any_order(names: list[str], one_in: int) -> None:
    """One file for each process, in any order, gives the conclusions of one file for all."""

    def check(name: str) -> None:
        files = by_process(LOGS[name])
        for seed in some_of(range(3), name, one_in):
            Random(seed).shuffle(files)
            assert without_order(concluded(*files)) == without_order(as_it_is(name))

    each(names, check)


@logs
def test_first_number(names: list[str]) -> None:
    """Where a log begins in a file that had lines before changes no conclusion but the numbers of the lines."""

    def check(name: str) -> None:
        found = []
        for first in (1, 5001):
            account = Account()
            account.add_lines([(first, "\n".join(LOGS[name]))], "log")
            found.append([(one.name, one.says, [at.line - first for at in one.evidence]) for one in findings(account)])
        assert found[0] == found[1]

    each(names, check)
