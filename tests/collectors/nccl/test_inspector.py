"""NCCL Inspector's output, read line by line.

The fixtures are made by hand in the form of NVIDIA/nccl, plugins/profiler/inspector: README.md, inspector_json.cc of NCCL 2.28.3 and
2.30.7, inspector_prom.cc of 2.30.7.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.collectors.nccl.inspector import Mean, Timed, parse_line, parse_prom
from tests.helpers import examples

FIXTURES = Path(__file__).parents[2] / "fixtures/inspector"
LINES = [line for path in sorted(FIXTURES.glob("*.log")) for line in path.read_text().splitlines()]


def read(name: str) -> list[Timed | None]:
    """The records of a fixture."""
    return [parse_line(line) for line in (FIXTURES / name).read_text().splitlines()]


def test_first_version() -> None:
    """NCCL 2.28 gives operation, size, time and how it was measured; sizes are those of nccl-tests, of all ranks together."""
    told = [record for record in read("nccl-2.28.log") if record is not None]
    assert [(t.op, t.seq, t.size_bytes, t.duration_s, t.timing) for t in told] == [
        ("all_reduce", 1, 8_000_000, 1e-3, "kernel_gpu"),
        ("all_reduce", 2, 8_000_000, 3e-3, "kernel_gpu"),
        ("all_gather", 3, 2_000_000, 250e-6, "kernel_gpu"),
        ("reduce_scatter", 4, 2_000_000, 500e-6, "kernel_gpu"),
        ("broadcast", 5, 65_536, 16e-6, "collective_cpu"),
    ]
    assert {(t.comm, t.comm_name, t.group_rank, t.group_size, t.host, t.pid) for t in told} == {
        ("0x7f8c496ae9f661", None, 0, 2, "host", 104)
    }


def test_named_communicators_and_messages() -> None:
    """NCCL 2.30 names communicators and includes messages; an operation without a known name is counted as other, without a size."""
    told = [record for record in read("nccl-2.30.log") if record is not None]
    assert [(t.op, t.size_bytes) for t in told] == [
        ("all_reduce", 8_000_000),
        ("other", None),
        ("send", 1_048_576),
        ("recv", 1_048_576),
    ]
    assert {(t.comm_name, t.unknown_fields) for t in told} == {("pair", 0)}


def test_verbose() -> None:
    """The verbose form is the same with more in it, none of it unknown."""
    (record,) = read("verbose.log")
    assert record is not None
    assert (record.op, record.duration_s, record.unknown_fields, record.group_rank) == (
        "reduce_scatter",
        0.041057,
        0,
        4,
    )


def test_without_timing_source() -> None:
    """A record without its kind of timing has unknown timing, never GPU time."""
    said = json.loads(LINES[0])
    del said["coll_perf"]["coll_timing_source"]
    assert parse_line(json.dumps(said)) is not None
    for source in (None, "sundial", 5):
        said["coll_perf"]["coll_timing_source"] = source
        record = parse_line(json.dumps(said))
        assert record is not None
        assert record.timing == "unknown"


def test_unknown_fields() -> None:
    """Fields of a later version are counted and skipped, wherever they are."""
    said = json.loads(LINES[0])
    said["proxy"] = {}
    said["header"]["numa"] = 1
    said["metadata"]["uptime"] = [1]
    said["coll_perf"]["coll_steps"] = "x"
    record, plain = parse_line(json.dumps(said)), parse_line(LINES[0])
    assert record is not None
    assert plain is not None
    assert record == plain._replace(unknown_fields=4)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("header",), []),
        (("header", "rank"), 2),
        (("header", "rank"), True),
        (("header", "n_ranks"), 0),
        (("header", "id"), 5),
        (("metadata", "pid"), -1),
        (("metadata", "hostname"), None),
        (("coll_perf",), "x"),
        (("coll_perf", "coll"), None),
        (("coll_perf", "coll_sn"), 1.5),
        (("coll_perf", "coll_exec_time_us"), 1 << 60),
        (("coll_perf", "coll_exec_time_us"), float("nan")),
    ],
)
def test_nonsense(place: tuple[str, ...], value: Any) -> None:
    """A line that lacks what a record needs, or has nonsense there, is none."""
    said = json.loads(LINES[0])
    target = said
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert parse_line(json.dumps(said)) is None


@given(st.sampled_from(LINES), st.integers(0, 2000), st.integers(0, 2000), st.text(max_size=8))
@examples(300)
def test_any_line(line: str, cut: int, until: int, more: str) -> None:
    """Torn, glued and foreign lines never raise."""
    torn = line[:cut] + more + line[until:]
    for text in (torn, line[:cut], more, line + line, "[" * 100_000):
        record = parse_line(text)
        assert record is None or record.duration_s >= 0
    assert parse_line(line) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(LINES), st.sampled_from(["header", "metadata", "coll_perf", "p2p_perf"]), st.data())
@examples(300)
def test_any_value(line: str, part: str, data: st.DataObject) -> None:
    """Any value in any place raises nothing, and all accepted values are within bounds."""
    said = json.loads(line)
    inner = said.setdefault(part, {})
    inner[data.draw(st.sampled_from([*inner, "new"]))] = data.draw(json_values)
    record = parse_line(json.dumps(said))
    assert record is None or (0 <= record.group_rank < record.group_size and 0 <= record.duration_s <= 86_400)


# -- the text files


def test_means() -> None:
    """A text file gives each mean with its labels."""
    told = list(parse_prom((FIXTURES / "nccl-2.30.prom").read_text()))
    assert len(told) == 6
    assert told[0].metric == "nccl_bus_bandwidth_gbs"
    assert told[0].value == 678.263
    assert (told[0].labels["comm_name"], told[0].labels["collective"]) == ("DP Group 0", "AllReduce")
    assert told[5].labels["p2p_operation"] == "Send"


def test_counters_of_the_text_file() -> None:
    """The counters that newer versions add on request are no means."""
    counter = 'nccl_collectives_dropped_total{version="v5.1",slurm_job_id="unknown",node="host",gpu="GPU0"} 12\n'
    assert list(parse_prom(counter)) == []


def test_half_written_means() -> None:
    """A line that is not whole yet is not read; its file will change again."""
    text = (FIXTURES / "nccl-2.30.prom").read_text()
    whole = list(parse_prom(text))
    for cut in range(0, len(text), 7):
        assert list(parse_prom(text[:cut])) == whole[: text[:cut].count("\n")]


@given(st.text() | st.from_regex(r'nccl_[a-z]{1,9}\{[a-z="]{0,20}\} [-0-9.eEnainf]{1,8}\n'))
@examples(200)
def test_any_text(text: str) -> None:
    """Any content of a text file raises nothing, and no value is negative, infinite or NaN."""
    for mean in parse_prom(text):
        assert isinstance(mean, Mean)
        assert 0 <= mean.value < float("inf")
