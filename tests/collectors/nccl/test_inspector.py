"""NCCL Inspector's output, read line by line.

The fixtures are made by hand in the form of NVIDIA/nccl, plugins/profiler/inspector: README.md, inspector_json.cc of NCCL 2.28.3 and
2.30.7. The files of formats v4.1 to v4.3 are made by hand, too, in the form of inspector_json.cc and README.md
in pull requests 2304 and 2359 of NVIDIA/nccl and in its commit 35d819ec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.inspector import Dropped, Reader, Timed
from tests.helpers import examples

FIXTURES = Path(__file__).parents[2] / "fixtures/inspector"
#: Each has its communicator and process.
LINES = [
    line
    for name in ("nccl-2.28", "nccl-2.30", "verbose")
    for line in (FIXTURES / f"{name}.log").read_text().splitlines()
]
#: Of v4.3: two dumps with records, and one without.
BATCHES = (FIXTURES / "v4.3.log").read_text().splitlines()


def parse_line(line: str) -> Timed | None:
    """An operation in a line that stands alone."""
    record = Reader().read(line)
    assert not isinstance(record, Dropped)
    return record


def read_all(lines: list[str]) -> tuple[list[Timed], list[Dropped], Reader]:
    """What a file has."""
    reader = Reader()
    records = [reader.read(line) for line in lines]
    timed = [record for record in records if isinstance(record, Timed)]
    return timed, [record for record in records if isinstance(record, Dropped)], reader


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


@pytest.mark.parametrize("version", ["v4.1", "v4.2", "v4.3"])
def test_dumps(version: str) -> None:
    """v4.1 and later tell how many records were overwritten, and v4.3 has a communicator once for all records of a dump."""
    timed, dropped, reader = read_all((FIXTURES / f"{version}.log").read_text().splitlines())
    assert [(t.comm, t.comm_name, t.op, t.seq, t.size_bytes, t.duration_s) for t in timed] == [
        ("0x7f8c496ae9f661", "pair", "all_reduce", 4, 8_000_000, 1e-3),
        ("0x7f8c496ae9f661", "pair", "all_reduce", 5, 8_000_000, 3e-3),
        ("0x7f8c496ae9f661", "pair", "send", 1, 1_048_576, 1e-4),
        ("0x51aa", None, "all_gather", 1, 2_000_000, 25e-5),
    ]
    assert [(d.comm, d.collectives, d.messages) for d in dropped] == [
        ("0x7f8c496ae9f661", 3, 0),
        ("0x51aa", 0, 0),
        ("0x7f8c496ae9f661", 5, 7),
    ]
    whose = {(t.group_rank, t.group_size, t.host, t.pid, t.unknown_fields) for t in timed}
    assert whose | {(d.group_rank, d.group_size, d.host, d.pid, d.unknown_fields) for d in dropped} == {
        (0, 2, "host", 104, 0)
    }
    chosen = [("RING", "SIMPLE"), ("RING", "LL"), (None, None), ("NVLS", "SIMPLE")]
    assert [(t.algorithm, t.protocol) for t in timed] == (chosen if version > "v4.1" else [(None, None)] * 4)
    assert (reader.unknown_lines, reader.unread_versions) == (0, set())


@pytest.mark.parametrize("torn", range(len(BATCHES)))
def test_damaged_line_of_a_dump(torn: int) -> None:
    """A damaged record loses itself only; without the line that begins a dump, its records belong to no communicator."""
    timed, _, reader = read_all([line[:40] if number == torn else line for number, line in enumerate(BATCHES)])
    whole, _, _ = read_all(BATCHES)
    of_line = {1: 0, 2: 1, 3: 2, 6: 3}
    lost = {0: {0, 1, 2}, 5: {3}}.get(torn, {of_line[torn]} if torn in of_line else set())
    assert timed == [record for number, record in enumerate(whole) if number not in lost]
    assert reader.unknown_lines == {0: 5, 5: 2}.get(torn, 1)


def test_missing_lines_of_a_dump() -> None:
    """A dump that lacks records ends where the next begins; records beyond those announced, or after a jump, have no communicator."""
    timed, _, reader = read_all([BATCHES[0], BATCHES[5], *BATCHES[6:]])
    assert ([t.comm for t in timed], reader.unknown_lines) == (["0x51aa"], 0)
    timed, _, reader = read_all([BATCHES[5], BATCHES[6], BATCHES[6]])
    assert (len(timed), reader.unknown_lines) == (1, 1)
    reader = Reader()
    reader.read(BATCHES[0])
    reader.forget()
    assert reader.read(BATCHES[1]) is None
    assert reader.unknown_lines == 1


def test_files_of_several_formats() -> None:
    """Lines that have their own communicator keep it, also between the records of a dump; other text is counted."""
    timed, dropped, reader = read_all([BATCHES[0], LINES[0], BATCHES[1], "Killed", "", LINES[-1], *BATCHES[2:]])
    assert [t.seq for t in timed] == [1, 4, 1231, 5, 1, 1]
    assert len(dropped) == 3
    assert reader.unknown_lines == 1


def test_later_format() -> None:
    """A format that is not known is read where it has the known fields; where it has not, its name is kept."""
    lines = [
        line.replace('"v4.3"', '"v4.9"').replace('"proxy_records"', '"proxy_mode":"flat","proxy_records"')
        for line in BATCHES
    ]
    timed, dropped, reader = read_all(lines)
    assert (len(timed), [d.unknown_fields for d in dropped]) == (4, [1, 1, 1])
    assert (reader.unknown_lines, reader.unread_versions) == (0, set())
    timed, _, reader = read_all([line.replace('"coll_sn"', '"sequence"') for line in lines])
    assert (len(timed), reader.unknown_lines, reader.unread_versions) == (1, 3, {"v4.9"})
    for number in range(100):
        reader.read(json.dumps({"header": {}, "metadata": {"inspector_output_format_version": f"v5.{number}"}}))
    assert len(reader.unread_versions) == 8
    for version in ("v5\n", "5", "v" + 9 * "1", 5, None):
        reader = Reader()
        reader.read(json.dumps({"header": {}, "metadata": {"inspector_output_format_version": version}}))
        assert (reader.unknown_lines, reader.unread_versions) == (1, set())


@pytest.mark.parametrize(
    ("name", "value"),
    [("coll_dropped_total", -1), ("p2p_dropped_total", None), ("coll_records", "1"), ("proxy_records", 0.5)],
)
def test_nonsense_in_a_dump(name: str, value: Any) -> None:
    """A dump with an invalid number is not read."""
    said = json.loads(BATCHES[0])
    said["dump_stats"][name] = value
    timed, dropped, reader = read_all([json.dumps(said), *BATCHES[1:4]])
    assert (timed, dropped, reader.unknown_lines) == ([], [], 4)


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


@given(st.lists(st.sampled_from(BATCHES) | st.text(max_size=8)), st.integers(0, 400))
@examples(300)
def test_any_order(lines: list[str], cut: int) -> None:
    """Lines in any order, torn ones among them, never raise; no more records are taken than were announced."""
    timed, dropped, reader = read_all([*lines, *(line[:cut] for line in lines)])
    assert len(timed) <= 3 * len(dropped)
    assert reader.unknown_lines <= 2 * len(lines)


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


@given(st.sampled_from(["header", "metadata", "dump_stats"]), st.data())
@examples(300)
def test_any_value_in_a_dump(part: str, data: st.DataObject) -> None:
    """Any value in the line that begins a dump raises nothing."""
    said = json.loads(BATCHES[0])
    if data.draw(st.booleans()):
        said[part] = data.draw(json_values)
    else:
        said[part][data.draw(st.sampled_from([*said[part], "new"]))] = data.draw(json_values)
    timed, dropped, _ = read_all([json.dumps(said), *BATCHES[1:5]])
    assert len(timed) <= 3 * len(dropped)
    assert all(record.collectives >= 0 and record.messages >= 0 for record in dropped)


# -- the text files
