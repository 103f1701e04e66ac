"""Logs of failures as they come in the wild: what ``commwatch explain`` must print for each of them, and must not.

The folders ``public`` and ``wild`` of ``tests/fixtures/nccl`` hold the logs and ``expected.json``; ``README.md`` there gives their origin.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from commwatch_agent.commands.explain import explain

NCCL = Path(__file__).parents[2] / "fixtures" / "nccl"
#: A line of the log that is shown for a finding: these words are the log's, not ours.
QUOTED = re.compile(r"^  [^ :]+\.log:\d+: .*\n", re.MULTILINE)
#: The first line of a finding.
FINDING = re.compile(r"^(?=(?:ERROR|WARNING|INFO) )", re.MULTILINE)


class Case(NamedTuple):
    """A log, and what must be printed for it."""

    log: Path
    expected: dict[str, Any]


def _cases(folder: Path) -> list[Case]:
    expected = json.loads((folder / "expected.json").read_text())
    assert sorted(expected) == sorted(path.stem for path in folder.glob("*.log"))
    return [Case(folder / f"{name}.log", of_log) for name, of_log in expected.items()]


ALL = [*_cases(NCCL / "public"), *_cases(NCCL / "wild")]


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, " ".join(text.split()), re.IGNORECASE) is not None


def faults(expected: dict[str, Any], code: int, output: str) -> list[str]:
    """Return in what the output of a log is not as expected; its first line has the name of the log, which shows nothing."""
    _, _, text = QUOTED.sub("", output).partition("\n")
    first = FINDING.split(text, maxsplit=2)[1:2]
    wrong = [f"exit {code}"] if expected["exit"] not in (None, code) else []
    wrong += [f"lacks {pattern}" for pattern in expected["must"] if not _found(pattern, text)]
    wrong += [f"says {pattern}" for pattern in expected["must_not"] if _found(pattern, text)]
    if "first" in expected and not (first and _found(expected["first"], first[0])):
        wrong.append(f"does not begin with {expected['first']}")
    return wrong


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.log.parent.name}-{case.log.stem}")
def test_failure_in_the_wild(case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The text names the cause and its remedy, not a consequence, and the exit code is that of the severity."""
    monkeypatch.chdir(case.log.parent)
    code = explain([case.log.name], json_wanted=False)
    output = capsys.readouterr().out
    assert not faults(case.expected, code, output), output
