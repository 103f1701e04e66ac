"""Wrapped lines: joined where their lengths show that they were wrapped, and nothing else is joined."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.input.lines import MOST_BYTES, lines_of, split_lines
from commwatch_collectors.nccl.input.wraps import unwrapped
from tests.collectors.nccl.test_fuzz import cut, glued, line
from tests.collectors.nccl.test_same_results import LOGS
from tests.helpers import examples

WATCHDOG = (
    "[rank6]:[E424 01:11:21.160812730 ProcessGroupNCCL.cpp:629] [Rank 6] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=88, OpType=BROADCAST, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
WARNING = (
    "ant:7:9 [3] misc/ibvwrap.cc:323 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev mlx5_2:1, "
    "curr state INIT, next state RTR, local GID index 3"
)
TRAIL = "ant:7:9 [3] NCCL INFO transport/net_ib.cc:1740 -> 2"


def read(*lines: str) -> list[str]:
    """The texts of a log of these lines, without empty ones."""
    return [text for _, text in split_lines(lines_of(io.BytesIO("\n".join(lines).encode()))) if text]


@pytest.mark.parametrize("width", [57, 80, 91, 100, 117, 132])
def test_at_a_width(width: int) -> None:
    """Messages that a terminal of any width has wrapped are whole again, each under the number of its first line."""
    log = [WATCHDOG, WARNING, TRAIL]
    lines = [text[at : at + width] for text in log for at in range(0, len(text), width)]
    assert read(*lines) == log
    numbers = [number for number, text in split_lines(lines_of(io.BytesIO("\n".join(lines).encode()))) if text]
    assert numbers == [1, 1 + -(-len(WATCHDOG) // width), len(lines)]
    assert [text.rstrip("\r") for text in read(*(f"{text}\r" for text in lines))] == log


@pytest.mark.parametrize("at", [100, 104, 105, 130, 137, 150, 180, 222])
@pytest.mark.parametrize("blank", ["", "lost"])
def test_report_of_the_watchdog(at: int, blank: str) -> None:
    """A report of PyTorch's watchdog is known by its form: it is joined wherever it was cut, in a log with longer lines."""
    first, rest = WATCHDOG[:at], WATCHDOG[at:]
    if blank:
        first, rest = first.rstrip(), rest.lstrip()
    (*_, found) = read("ant:7:9 [3] NCCL INFO " + "x" * 300, first, rest)
    assert found.replace(" ", "") == WATCHDOG.replace(" ", "")
    if first + rest == WATCHDOG or not blank:
        assert found == WATCHDOG


@pytest.mark.parametrize(
    "prefix", ["> ", "2: ", "    {0}\t", "{0}:", "job.log:{0}:", "2026-01-02T03:04:0{0}Z ", "train-0 main "]
)
def test_prefixes_of_wrapped_lines(prefix: str) -> None:
    """A report of the watchdog that got a prefix on each of its lines is joined without the later ones."""
    lines = [WATCHDOG[:139], WATCHDOG[139:220], WATCHDOG[220:], "[rank1]: step 3"]
    marked = [prefix.format(number) + text for number, text in enumerate(lines, 1)]
    assert read(*marked) == [prefix.format(1) + WATCHDOG, marked[-1]]


def test_ranks_that_take_turns() -> None:
    """The rest of a report is not looked for in the lines of another rank."""
    lines = [f"0: {WATCHDOG[:139]}", "1: step 3", f"1: {WATCHDOG[:139]}", f"0: {WATCHDOG[139:]}"]
    assert read(*lines) == lines


def test_bracket() -> None:
    """A warning whose bracket closes in the next line goes on there, at any width."""
    said = "ant:7:9 [3] net_ofi_test:311 NCCL WARN NET/OFI Request 0x55 completed with error. RC: 113. Error: 15 (Unreachable host), x"
    assert read(TRAIL, said[:105], said[105:], TRAIL) == [TRAIL, said, TRAIL]
    assert read(TRAIL, said[:105], "step (3)") == [TRAIL, said[:105], "step (3)"]


@pytest.mark.parametrize("at", [93, 107])
def test_one_line(at: int) -> None:
    """One message that was wrapped at a width that is not usual is joined if only both lines together have a known form."""
    said = "ant:7:9 [3] NCCL INFO ncclCommInitRank comm 0x5a00 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x5 - Init START"
    assert read(TRAIL, said[:at], said[at:], TRAIL) == [TRAIL, said, TRAIL]
    assert read(TRAIL, said[:at].rstrip(), said[at:].lstrip(), TRAIL) == [TRAIL, said, TRAIL]


@pytest.mark.parametrize(
    "lines",
    [
        [WARNING, "step 3: loss 0.5", TRAIL],
        [WARNING, "[rank3]: ValueError: x"],
        [WARNING, "torch.distributed.DistBackendError: NCCL error"],
        [WARNING, "Traceback (most recent call last):", '  File "train.py", line 3, in <module>'],
        [WARNING, WARNING, ""],
        [WARNING, "", "rest"],
        [f"0: {WARNING}", "0: step 3"],
        [TRAIL, "short", "x" * 90, "y"],
        [f"{WATCHDOG[:100]}", TRAIL],
        ["ant:7:9 [3] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0", "epoch 3 of 10 begins"] * 3,
    ],
)
def test_other_text(lines: list[str]) -> None:
    """Other text behind a message is not joined to it."""
    assert read(*lines) == [text for text in lines if text]


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_logs_that_are_not_wrapped(log: Path) -> None:
    """No recorded log is changed."""
    text = log.read_text(errors="replace")
    assert list(split_lines(unwrapped([(1, text)]))) == list(split_lines([(1, text)]))


@given(
    st.lists(line | cut | glued | st.binary(max_size=60), max_size=30),
    st.sampled_from([40, 80, 99, 132, 400]),
    st.booleans(),
)
@examples(150)
def test_any_text(parts: list[bytes], width: int, exact: bool) -> None:
    """Whatever is wrapped, each line keeps its number, and no character but blanks is lost or moved."""
    text = b"\n".join(parts).decode("utf-8", "replace")
    pieces = [part[at : at + width] for part in text.split("\n") for at in range(0, len(part) or 1, width)]
    texts = [(1, "\n".join(pieces if exact else text.split("\n")))]
    before, after = list(split_lines(texts)), list(split_lines(unwrapped(texts)))
    assert [number for number, _ in before] == [number for number, _ in after]
    assert "".join("".join(each.split()) for _, each in before) == "".join("".join(each.split()) for _, each in after)


@pytest.mark.timeout(60)  # half a second where this was written
@pytest.mark.parametrize("seed", ["a.", "a ", "Watchdog caught ", "WorkNCCL(", "aError", "[rank1", "1: ", "ant:1:1 "])
def test_hostile(seed: str) -> None:
    """Lines made to be tried again and again are read in the time that their length needs, and joined ones are bounded."""
    for width in (80, 400, MOST_BYTES):
        text = "\n".join([(seed * width)[:width]] * (500_000 // width))
        assert all(len(each) < MOST_BYTES + 10 for _, each in split_lines(unwrapped([(1, text)])))
