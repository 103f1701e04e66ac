"""Dumps of the Flight Recorder: ones of NCCL by hand, damaged ones, and ones that want to do harm.

Source of the form: pytorch/pytorch 2.13, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and ProcessGroupNCCL.cpp (names of
operations). Real dumps of Gloo are in ``tests/e2e/test_recorded.py``.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.node.flight_recorder import BadDump, load, unpickled
from tests.helpers import examples

BEGIN_NS = 1_763_746_202_000_000_000


def entry(record_id: int = 0, seq: int = 1, **more: Any) -> dict[str, Any]:
    """One operation of NCCL as the recorder writes it; a second after the previous one, completed by default."""
    created = BEGIN_NS + record_id * 1_000_000_000
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "kernel", "filename": "/x/site-packages/commwatch/probe/torch_python.py", "line": 7},
        {"name": "train", "filename": "/job/train.py", "line": 33},
    ]
    return {
        "frames": frames,
        "record_id": record_id,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "input_sizes": [[1024, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[1024, 2]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": created + 1_000,
        "time_discovered_completed_ns": created + 5_000_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def pending(record_id: int, seq: int, state: str = "started", **more: Any) -> dict[str, Any]:
    """One that has not ended."""
    about = {"state": state, "retired": False, "time_discovered_completed_ns": None}
    return entry(record_id, seq, **{**about, **more})


def dump_of(*entries: dict[str, Any], ranks: str = "[0, 1]") -> dict[str, Any]:
    """A dump with those entries, of a default group of two."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    status = {"0": {"last_enqueued_collective": 1, "last_started_collective": 1, "last_completed_collective": 1}}
    return {
        "version": "2.10",
        "pg_config": config,
        "comm_lib_version": "2.29.1",
        "pg_status": status,
        "entries": list(entries),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nccl(protocol: int) -> None:
    """An NCCL dump gives group, members, operation, size, state and call site, in each form of pickle and in JSON."""
    said = dump_of(entry(0, 1), pending(1, 2))
    dump = load(pickle.dumps(said, protocol))
    first, second = dump.entries
    assert dump.members == {("0", "default_pg"): (0, 1)}
    assert (first.op, first.seq, first.size_bytes, first.dtype, first.done) == ("all_reduce", 1, 4096, "BFloat16", True)
    assert first.completed_ns == first.created_ns + 5_000_000
    assert (second.state, second.done, second.completed_ns) == ("started", False, None)
    assert second.frame == "/job/train.py:33 in train"
    assert load(json.dumps(said).encode()) == dump


@pytest.mark.parametrize(
    ("name", "op", "more"),
    [
        ("nccl:_all_gather_base", "all_gather", {}),
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter", {}),
        ("nccl:all_reduce_barrier", "barrier", {}),
        ("nccl2:all_to_all_single", "all_to_all", {}),
        ("nccl:send 0->1", "send", {"is_p2p": True, "p2p_seq_id": 1}),
        ("gloo:barrier", "barrier", {}),
        ("nccl:something_new", "something_new", {}),
    ],
)
def test_operations(name: str, op: str, more: dict[str, Any]) -> None:
    """Operations have canonical names; unknown ones keep their own."""
    (read,) = load(pickle.dumps(dump_of(entry(profiling_name=name, **more)))).entries
    assert (read.op, read.is_p2p) == (op, op == "send")


def test_size() -> None:
    """The size is that of the whole: the output of an all_gather, the input of a reduce_scatter."""
    for whole in (entry(input_sizes=[[4096]]), entry(output_sizes=[[4096]])):
        (read,) = load(pickle.dumps(dump_of(whole))).entries
        assert read.size_bytes == 8192


def test_ended() -> None:
    """On Gloo what is retired has ended, though it says scheduled; on NCCL that may mean that it failed."""
    for backend, done in (("gloo", True), ("nccl", False)):
        said = dump_of(pending(0, 1, "scheduled", retired=True, profiling_name=f"{backend}:all_reduce"))
        assert load(pickle.dumps(said)).entries[0].done is done


def test_unknown_sizes() -> None:
    """Unknown types and shapes have no size."""
    for sizes, dtypes in (([[2]], ["Posit8"]), ([[2]], []), ([["x"]], ["Float"]), ([[-1]], ["Float"]), (5, "Float")):
        about: dict[str, Any] = {"input_sizes": sizes, "input_dtypes": dtypes, "output_sizes": [], "output_dtypes": []}
        (read,) = load(pickle.dumps(dump_of(entry(**about)))).entries
        assert read.size_bytes is None


def test_overwritten() -> None:
    """A dump whose first records are gone is marked as such."""
    assert not load(pickle.dumps(dump_of(entry(0)))).cut
    assert load(pickle.dumps(dump_of(entry(17)))).cut


def test_damaged_entries() -> None:
    """Entries that lack what is needed are counted and passed over."""
    odd: list[Any] = [5, {}, entry(process_group="x"), entry(collective_seq_id="1"), entry(time_created_ns=-1)]
    dump = load(pickle.dumps(dump_of(*odd, entry())))
    assert (len(dump.entries), dump.unknown) == (1, 5)


def test_printable() -> None:
    """Names in a dump cannot reach the terminal as they please."""
    frames = [{"name": "\x1b[31m", "filename": "a\nb", "line": 1}]
    (read,) = load(pickle.dumps(dump_of(entry(frames=frames)))).entries
    assert read.frame == "a?b:1 in ?[31m"


# -- what wants to do harm


class Harm:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("harm done",))


def test_no_globals(capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle that names a function, a class or an extension is refused, and nothing of it is called."""
    for protocol in range(6):
        with pytest.raises(BadDump, match="its pickle uses"):
            load(pickle.dumps(dump_of(entry(frames=Harm())), protocol))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"\x80\x02}.",
        b"\x80\x02K\x01.",
        b"\x80\x02N.",
        b"\x80\x02}h\x05.",  # memo that is not there
        b"\x80\x02}r\xff\xff\xff\xff.",  # memo that would fill all memory if it were an array
        b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b"x.",  # text longer than the file
        b"\x80\x02\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
        b"\x80\x02\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x02a.",
        b"\x80\x02u.",
        b"\x80\x02(u.",
        b"\x80\x02NK\x01a.",
        b"\x80\x02](K\x01u.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}]K\x01s.",  # a key that cannot be one
        b"\x80\x02" + b"\x85" * 10 + b".",
        b"{" * 100_000,
        b'{"version":' * 100_000,
    ],
)
def test_no_dump(data: bytes) -> None:
    """Any file that is not a dump is refused with a message."""
    with pytest.raises(BadDump):
        load(data)


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps that are too large, or have too many steps, are refused."""
    with monkeypatch.context() as patch:
        patch.setattr("commwatch_collectors.node.flight_recorder.MOST_BYTES", 1000)
        with pytest.raises(BadDump, match="larger"):
            load(b"x" * 1001)
    monkeypatch.setattr("commwatch_collectors.node.flight_recorder.MOST_STEPS", 1000)
    with pytest.raises(BadDump, match="steps"):
        load(b"\x80\x02" + b"}" * 2000 + b".")


def test_latest_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dump with too many operations the latest are read: the ones that hang are among them."""
    monkeypatch.setattr("commwatch_collectors.node.flight_recorder.MOST_ENTRIES", 2)
    dump = load(pickle.dumps(dump_of(entry(0, 1), entry(1, 2), pending(2, 3))))
    assert [read.seq for read in dump.entries] == [2, 3]


def test_references_to_itself() -> None:
    """A list that holds itself, and one that holds itself doubled many times over, are no trouble."""
    itself: list[Any] = []
    itself.append(itself)
    many: list[Any] = []
    for _ in range(60):
        many = [many, many]
    dump = load(pickle.dumps(dump_of(entry(frames=itself), entry(input_sizes=many)), 2))
    assert [read.frame for read in dump.entries] == [None, "/job/train.py:33 in train"]


SAMPLE = pickle.dumps(dump_of(entry(0, 1), pending(1, 2)), 2)


# pickletools decodes a text with an unknown escape sequence, and warns.
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@given(st.integers(0, len(SAMPLE)), st.integers(0, len(SAMPLE)), st.binary(max_size=6))
@examples(500)
def test_any_bytes(cut: int, until: int, more: bytes) -> None:
    """Torn and altered dumps are read or refused."""
    for data in (SAMPLE[:cut] + more + SAMPLE[until:], SAMPLE[:cut] + more + SAMPLE[cut + len(more) :], more):
        with contextlib.suppress(BadDump):
            load(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(values)
@examples(200)
def test_plain_values(value: Any) -> None:
    """Plain values come out as they went in."""
    for protocol in (2, 4, 5):
        with contextlib.suppress(ValueError):  # an integer of more than 255 bytes is none of PyTorch's
            read = unpickled(pickle.dumps(value, protocol))
            assert repr(read) == repr(value)


@given(st.sampled_from(sorted(entry())), values)
@examples(300)
def test_any_value(key: str, value: Any) -> None:
    """Any value in any place of a dump raises nothing."""
    dump = load(pickle.dumps(dump_of({**entry(), key: value}), 2))
    assert len(dump.entries) + dump.unknown == 1
