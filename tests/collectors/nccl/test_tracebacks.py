"""Exceptions at the end of tracebacks in lines without a rank: behind prefixes, among other lines, cut, and none in other text."""

from __future__ import annotations

import time

import pytest

from commwatch_collectors.nccl.tracebacks import Ended, Tracebacks

TRACEBACK = ["Traceback (most recent call last):", '  File "/src/a.py", line 3, in f', "    x = y[0]", "KeyError: 'x'"]


def _ended(lines: list[str]) -> list[Ended]:
    found = Tracebacks()
    return [ended for line in lines if (ended := found.read(line)) is not None]


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("", ""),
        ("(Worker pid=99, ip=10.3.0.7) ", "pid 99"),
        ("[1,2]<stderr>:", "rank 2"),
        ("3: ", "task 3"),
        ("[default1]:", "local rank 1"),
        ("2026-05-07 11:22:33,445 - trainer - ERROR - ", ""),
    ],
)
def test_prefixes(prefix: str, who: str) -> None:
    """The exception is found behind what launchers and loggers put before lines, with the process that these name."""
    assert _ended([prefix + line for line in TRACEBACK]) == [Ended(who, "KeyError: 'x'", False)]


def test_ranks_are_read_elsewhere() -> None:
    """PyTorch's mark of the rank shows more, and another form reads it."""
    assert _ended(["[rank1]: " + line for line in TRACEBACK]) == []


def test_among_other_lines() -> None:
    """Lines of other processes do not end a traceback, and an excerpt may lack its first line."""
    others = ["Epoch: 3", "(Worker pid=7) ValueError: of another process", "note: KeyError: 'y' may be raised", ""]
    lines = [each for line in TRACEBACK[1:3] for each in (line, *others)] + TRACEBACK[3:]
    assert _ended(lines) == [Ended("", "KeyError: 'x'", False)]


def test_handled() -> None:
    """An exception that came while another one was handled supersedes it."""
    handling = ["", "During handling of the above exception, another exception occurred:", ""]
    second = [*TRACEBACK[:3], "ValueError: no data"]
    assert _ended(TRACEBACK + handling + second) == [
        Ended("", "KeyError: 'x'", False),
        Ended("", "ValueError: no data", True),
    ]


def test_without_traceback() -> None:
    """The name of an exception alone ends no traceback, nor does one that begins long after."""
    assert _ended(["KeyError: 'x'"]) == []
    assert _ended([*TRACEBACK[:3], *["step"] * 500, TRACEBACK[3]]) == []


def test_hostile_lines() -> None:
    """Any lines are read in bounded time and memory."""
    lines = ['  File "' * 8_000, "a." * 30_000, "Traceback (" * 6_000, "During handling " * 4_000]
    lines += [f"{chr(97 + number % 26)} {'x' * number}Traceback (most recent call last):" for number in range(500)]
    start = time.perf_counter()
    assert _ended(lines * 2) == []
    assert time.perf_counter() - start < 5
