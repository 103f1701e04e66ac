"""Whole logs: what is counted of each is what its labels say."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.input.lines import lines_of
from commwatch_collectors.nccl.labels import labels

TREE = Path(__file__).parents[3]
FIXTURES = sorted((TREE / "tests/fixtures/nccl").glob("*.json"))
#: Logs that others wrote; they lie beside the repository, where they do.
CORPUS = sorted((TREE.parent / "shared/nccl/logs").glob("*.json"))
#: Where the log comes from, not what it says.
ABOUT = {"source", "sha256", "scrubbed", "notes"}
KINDS = {"none", 'slurm "N: "', "mpirun", "rank", "ray"}


def said(log: Path) -> dict[str, Any]:
    """The labels of a log, as a reader of the JSON gets them."""
    account = Account()
    account.add_lines(lines_of(io.BytesIO(log.read_bytes())), log.name)
    found: dict[str, Any] = json.loads(json.dumps(labels(account), allow_nan=False))
    return found


def comparable(key: str, value: Any) -> Any:
    """The value with its lists in one order (only that of a ring means something), and prefixes of our few kinds."""
    if key == "prefix":
        kinds = Counter[str]()
        for kind, count in value.items():
            kinds[kind if kind in KINDS else "other"] += count
        return dict(kinds)
    if isinstance(value, dict):
        return {name: comparable(name, inner) for name, inner in value.items()}
    if isinstance(value, list) and key != "order":
        return sorted((comparable("", inner) for inner in value), key=lambda inner: json.dumps(inner, sort_keys=True))
    return value


def check(expected: Path) -> None:
    wanted = {k: comparable(k, v) for k, v in json.loads(expected.read_text("utf-8")).items() if k not in ABOUT}
    found = {k: comparable(k, v) for k, v in said(expected.with_suffix(".log")).items()}
    different = {key: (wanted.get(key), found.get(key)) for key in wanted | found if wanted.get(key) != found.get(key)}
    assert not different, different


@pytest.mark.parametrize("expected", FIXTURES, ids=lambda path: path.stem)
def test_own_logs(expected: Path) -> None:
    """Our small logs of old, middle and new NCCL and of RCCL, torn and glued, give the labels that were counted by hand."""
    check(expected)


def test_own_logs_are_there() -> None:
    """Each log has its labels, and each of the four kinds its log."""
    assert {path.stem for path in FIXTURES} == {"nccl-2.7", "nccl-2.18", "nccl-2.29", "rccl-2.22"}
    assert all(path.with_suffix(".log").exists() for path in FIXTURES)


if CORPUS:  # else pytest would report a test without parameters as skipped

    @pytest.mark.parametrize("expected", CORPUS, ids=lambda path: path.stem)
    def test_corpus(expected: Path) -> None:
        """Logs from elsewhere give the labels that were made without this parser."""
        check(expected)


def test_excerpt() -> None:
    """What a thread says before the first ``Init START`` that we see is counted, too."""
    account = Account()
    head = "gpu-a7:1:2 [0] NCCL INFO "
    for number in range(3):
        account.add(head + "Channel 00/01 :    0   1", "log", number)
        account.add(
            head + "comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x2 - Init START", "log", number
        )
    assert labels(account)["ring_lines"] == 3


def test_same_pending() -> None:
    """What two communicators of one thread say alike counts twice, whichever of them it is of."""
    account = Account()
    for number, comm in enumerate(("0x1", "0x2")):
        for text in (
            "Channel 00/01 : 0 1",
            "Channel 00 : 1[1] -> 0[0] via P2P/IPC",
            f"comm {comm} rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE",
        ):
            account.add(f"gpu-a7:1:2 [0] NCCL INFO {text}", "log", number)
    found = labels(account)
    assert (found["ring_lines"], found["transports"], found["init_complete"]) == (2, {"P2P/IPC": 2}, 2)


def test_overflow_is_counted() -> None:
    """What there is no room for is counted as such, and what was kept stays right."""
    account = Account(most_facts=8)
    log = TREE / "tests/fixtures/nccl/nccl-2.18.log"
    account.add_lines(lines_of(io.BytesIO(log.read_bytes())), log.name)
    assert account.overflow > 0
    found = labels(account)
    assert (found["n_info"], found["n_warn"], found["cuda_driver_version"]) == (44, 1, [12020])


def test_nothing() -> None:
    """An empty log says nothing but that."""
    assert labels(Account()) == {"library": "none (torch side only)", "n_info": 0, "n_warn": 0, "line_endings": "LF"}
