"""Overlap out of traces made by hand, against results worked by hand."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.sources import trace_overlap
from commwatch_agent.sources.trace_overlap import BadTrace, overlap
from tests.agent.sources.kernel_sweep import kernels, sweep
from tests.helpers import PATIENCE_S, examples

#: Unix time of the trace's zero; its events are in µs from there, the window in ns since 1970.
BASE = 1_700_000_000_000_000_000
MAIN, AUTOGRAD, LOOP = 1, 2, 3


def event(category: str, name: str, start_us: float, end_us: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    """A complete event."""
    where = {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread}
    return {**where, "ts": start_us, "dur": end_us - start_us, "args": args}


def kernel(name: str, start_us: float, end_us: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A kernel."""
    return event("kernel", name, start_us, end_us, stream, **args)


def op(name: str, start_us: float, end_us: float, thread: int = MAIN) -> dict[str, Any]:
    """An operator on the CPU."""
    return event("cpu_op", name, start_us, end_us, thread)


def gloo(name: str, start_us: float, end_us: float, thread: int = LOOP) -> dict[str, Any]:
    """What the backend says."""
    return event("user_annotation", f"gloo:{name}", start_us, end_us, thread)


def measured(*events: dict[str, Any], from_us: int = 0, until_us: int = 100, **more: Any) -> tuple[Any, ...]:
    """Source, communication and exposed communication in µs."""
    trace = {"traceEvents": list(events), "baseTimeNanoseconds": BASE, **more}
    found = overlap(trace, BASE + from_us * 1000, BASE + until_us * 1000)
    times = (found.comm_s, found.exposed_s)
    return (found.source, *(None if seconds is None else pytest.approx(seconds * 1e6) for seconds in times))


# -- kernels ------------------------------------------------------------------------------------

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)"


def test_kernels_overlap() -> None:
    """On CUDA communication is the union of NCCL's kernels, exposed what of it no other kernel covers."""
    # NCCL 10 to 50, compute 0 to 20 and 40 to 45: of 40 µs, 10 + 5 are covered.
    assert measured(kernel(ALL_REDUCE, 10, 50, 20), kernel(GEMM, 0, 20), kernel(GEMM, 40, 45)) == ("kernels", 40, 25)


def test_several_streams() -> None:
    """Kernels that run at the same time count once, communication and compute alike, in whatever order they are listed."""
    events = [
        kernel(ALL_REDUCE, 40, 60, 21),
        kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", 10, 50, 20),  # together 10 to 60
        kernel(GEMM, 30, 48, 8),
        kernel(GEMM, 20, 40, 7),  # together 20 to 48
    ]
    assert measured(*events) == ("kernels", 50, 22)


def test_several_gpus() -> None:
    """A kernel hides communication of its own GPU only, whose number is an argument of the kernel, or else its process in the trace."""
    on_first, on_second = kernel(ALL_REDUCE, 0, 100, 20, device=0), kernel(GEMM, 20, 90, device=1)
    assert measured(on_first, on_second) == ("kernels", 100, 100)
    assert measured(on_first, on_second, kernel(GEMM, 0, 30, device=0)) == ("kernels", 100, 70)
    assert measured(kernel(ALL_REDUCE, 0, 100, 20), kernel(GEMM, 20, 90) | {"pid": 8}) == ("kernels", 100, 100)


def test_only_kernels_count() -> None:
    """If a trace has kernels, CPU operators, copies and GPU annotations count as neither compute nor communication."""
    events = [
        kernel(ALL_REDUCE, 10, 30),
        op("aten::mm", 0, 100),
        event("gpu_memcpy", "Memcpy HtoD", 10, 20, 9),
        event("gpu_user_annotation", "nccl:all_reduce", 0, 90, 20),
        event("user_annotation", "nccl:all_reduce", 0, 90),
        event("cuda_runtime", "cudaLaunchKernel", 10, 12),
    ]
    assert measured(*events) == ("kernels", 20, 20)


def test_groups() -> None:
    """By process group, named by its description, else by its name; what has neither counts in the whole only."""
    names = ("Process Group Name", "Process Group Description")
    data, tensor, plain = (
        dict(zip(names, pair, strict=True)) for pair in (("1", "mesh_dp"), ("2", "mesh_tp"), ("3", "undefined"))
    )
    events = [
        kernel(ALL_REDUCE, 0, 20, 20, **data),
        kernel(ALL_REDUCE, 50, 60, 20, **data),
        kernel(ALL_REDUCE, 10, 30, 21, **tensor),
        kernel(ALL_REDUCE, 70, 75, 22, **plain),
        kernel(ALL_REDUCE, 80, 81, 23),
        kernel(GEMM, 15, 55),
    ]
    trace = {"traceEvents": events, "baseTimeNanoseconds": BASE}
    found = overlap(trace, BASE, BASE + 100_000)
    # The whole: 0 to 30, 50 to 60, 70 to 75, 80 to 81, but for 15 to 55.
    assert (found.length_s, found.comm_s, found.exposed_s) == pytest.approx((1e-4, 46e-6, 26e-6))
    groups = {each.group: (each.comm_s, each.exposed_s) for each in found.groups}
    assert groups["3"] == pytest.approx((5e-6, 5e-6))
    assert groups["mesh_dp"] == pytest.approx((30e-6, 20e-6))
    assert groups["mesh_tp"] == pytest.approx((20e-6, 5e-6))
    assert len(groups) == 3


def test_window() -> None:
    """What lies outside of the steps does not count, what crosses their edges is cut there."""
    events = [
        kernel(ALL_REDUCE, 0, 10),
        kernel(ALL_REDUCE, 35, 50),
        kernel(ALL_REDUCE, 75, 95),
        kernel(GEMM, 30, 45),
        kernel(GEMM, 85, 200),
    ]
    # Within 40 to 80: NCCL 40 to 50 and 75 to 80, compute 40 to 45.
    assert measured(*events, from_us=40, until_us=80) == ("kernels", 15, 10)


#: Kernels as (start in ns, duration in ns, stream, communicates): they touch, nest, are empty, and cross the edges of the window.
KERNELS = st.tuples(st.integers(0, 120), st.integers(0, 40), st.integers(7, 9), st.booleans())


@examples(150)
@given(st.lists(KERNELS, min_size=1, max_size=20), st.integers(0, 60), st.integers(1, 60))
def test_as_a_plain_sweep(ran: list[tuple[int, int, int, bool]], begin: int, length: int) -> None:
    """Of any kernels on any streams, to the ns, it is what a plain sweep over their edges finds."""
    events = [
        kernel(ALL_REDUCE if communicates else GEMM, start / 1000, 0, stream) | {"dur": duration / 1000}
        for start, duration, stream, communicates in ran
    ]
    text = json.dumps({"traceEvents": [*events, op("aten::mm", 0, 200)], "baseTimeNanoseconds": BASE})
    found = overlap(json.loads(text), BASE + begin, BASE + begin + length)
    assert found.comm_s is not None
    assert found.exposed_s is not None
    assert (round(found.comm_s * 1e9), round(found.exposed_s * 1e9)) == sweep(kernels(text), begin, begin + length)


# -- operators on the CPU ---------------------------------------------------------------------


def test_cpu_overlap() -> None:
    """On CPU, communication is the time in which the backend works; the exposed part is what no operator covers, on any thread."""
    events = [
        gloo("all_reduce", 10, 40),
        gloo("all_reduce", 30, 60, LOOP + 1),  # together 10 to 60
        op("aten::mm", 0, 20),
        op("aten::linear", 45, 48),
        op("aten::mul_", 47, 50, AUTOGRAD),  # together 0 to 20 and 45 to 50
    ]
    assert measured(*events) == ("cpu_ops", 50, 35)


def test_shells_and_waits_are_no_compute() -> None:
    """Neither shells of autograd, nor collectives and waits, also within an operator, hide communication."""
    events = [
        gloo("all_reduce", 10, 90),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 100),
        op("torch::autograd::AccumulateGrad", 0, 100),
        op("AddmmBackward0", 0, 100),
        op("c10d::allreduce_", 5, 20),
        op("_c10d_functional::wait_tensor", 60, 70),
        event("user_annotation", "Optimizer.step#SGD.step", 0, 100),
        op("mylib::layer", 40, 80),  # computes but for its wait: 40 to 60 and 70 to 80
    ]
    assert measured(*events) == ("cpu_ops", 80, 50)


def test_backend_threads_do_not_compute() -> None:
    """What a backend computes in its own threads belongs to the collective."""
    events = [
        gloo("all_gather", 10, 40),
        op("aten::copy_", 20, 30, LOOP),
        op("c10d::allgather_", 5, 10),
        op("aten::mm", 12, 15),
    ]
    assert measured(*events) == ("cpu_ops", 30, 27)


def test_early_receives() -> None:
    """A receive counts only while nothing is computed: posted early it costs nothing. Its thread is the training's."""
    events = [gloo("recv", 0, 60, MAIN), op("aten::mm", 10, 50), gloo("all_reduce", 55, 70)]
    # recv 0 to 10 and 50 to 60, all_reduce 55 to 70: all exposed.
    assert measured(*events) == ("cpu_ops", 30, 30)


def test_silent_backend() -> None:
    """A backend that leaves nothing in the trace is not known, which is not zero; no collective at all is zero."""
    assert measured(op("c10d::allreduce_", 0, 5), op("aten::mm", 5, 50)) == ("cpu_ops", None, None)
    assert measured(op("aten::mm", 5, 50)) == ("cpu_ops", 0, 0)
    assert measured(event("user_annotation", "mylib::gloo:all_reduce", 0, 5), op("aten::mm", 5, 50)) == (
        "cpu_ops",
        0,
        0,
    )


# -- odd traces ---------------------------------------------------------------------------------


def test_missing_keys() -> None:
    """Events without times, names, arguments or form are passed over; without a base, times are since 1970."""
    odd: list[Any] = [
        {},
        None,
        {"ph": "X"},
        {"ph": "X", "ts": 3},
        {"ph": "X", "ts": "3", "dur": 5},
        {"ph": "i", "ts": 3, "name": ALL_REDUCE, "cat": "kernel"},
        {"ph": "X", "ts": BASE / 1000 + 10, "dur": 20, "cat": "kernel", "name": ALL_REDUCE},
        {"ph": "X", "ts": BASE / 1000 + 20, "dur": 5, "cat": "kernel", "tid": "stream 7", "args": []},
    ]
    found = overlap({"traceEvents": odd}, BASE, BASE + 100_000)
    assert (found.comm_s, found.exposed_s) == pytest.approx((20e-6, 15e-6))


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        ([], "no list of trace events"),
        ({"traceEvents": {}}, "no list of trace events"),
        ({"traceEvents": []}, "no event of the trace lies within the steps"),
        (
            {"traceEvents": [kernel(GEMM, 0, 5)], "baseTimeNanoseconds": BASE - 10**9},
            "its clock may differ from the system's",
        ),
        ({"traceEvents": [kernel(GEMM, 0, 5)], "baseTimeNanoseconds": "now"}, "its base time"),
    ],
)
def test_bad_traces(trace: Any, says: str) -> None:
    """What is no trace, or is one of another time, is refused by name."""
    with pytest.raises(BadTrace, match=says):
        overlap(trace, BASE, BASE + 1000)


@pytest.mark.parametrize(
    "content", [b"", b"not packed", gzip.compress(b'{"traceEvents": [', mtime=0), gzip.compress(b"{}", mtime=0)[:-4]]
)
def test_unreadable_files(tmp_path: Path, content: bytes) -> None:
    """The process that reads a trace always answers in JSON: a damaged file gives an error."""
    (tmp_path / "trace.gz").write_bytes(content)
    command = [sys.executable, "-m", "commwatch_agent.sources.trace_overlap", str(tmp_path / "trace.gz"), "0", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the trace cannot be read" in json.loads(done.stdout)["error"]


def read_apart(path: Path, most_bytes: int | None = None) -> tuple[dict[str, Any], int]:
    """What the process that reads a trace answers, and the most memory that it took, in bytes; ``most_bytes``: another limit."""
    limit = "t.MOST_BYTES" if most_bytes is None else str(most_bytes)
    # Not ``ru_maxrss``, which includes the memory of the process that starts this one.
    peak = "sys.stderr.write(next(line for line in open('/proc/self/status') if line.startswith('VmHWM:')))"
    do = "; ".join((f"t.MOST_BYTES = {limit}", "t.confine()", "t.main(sys.argv[1:])", peak))
    run = ["-c", f"import sys; from commwatch_agent.sources import trace_overlap as t; {do}"]
    command = [sys.executable, *run, str(path), str(BASE), str(BASE + 10**9)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout), int(done.stderr.split()[1]) << 10


def packed(path: Path, parts: Iterable[str]) -> Path:
    """A compressed trace; what it has before its events is complete."""
    with gzip.open(path, "wt", 3) as file:
        file.write(f'{{"baseTimeNanoseconds": {BASE}, "traceEvents": [')
        file.writelines(parts)
    return path


SMALL = json.dumps(kernel(GEMM, 1, 2))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (lambda: repeat(" " * 65_536, 4096), "it unpacks to more than 67108864 bytes and 200 times its size"),
        pytest.param(lambda: repeat("{}," * 20_000, 50), "cut short", marks=pytest.mark.long),
        (lambda: repeat("[],", 500_000), "cut short"),
        pytest.param(lambda: repeat(f"{SMALL},", 200_000), "cut short", marks=pytest.mark.long),
        (lambda: repeat("[", 1_000_000), "recursion"),
        (lambda: ['{"name": "', *repeat("x" * 65_536, 4096)], "cut short"),
        pytest.param(lambda: ['{"args": [', *repeat("{}," * 20_000, 4096)], "cut short", marks=pytest.mark.long),
        (lambda: repeat('{"ph": "X", "ts": 1e999, "dur": 1' + "0" * 500 + "},", 1000), "cut short"),
    ],
)
def test_bombs(tmp_path: Path, parts: Callable[[], Iterable[str]], says: str) -> None:
    """No small file makes the process that reads it take much memory, and the answer gives the reason on one line."""
    path = packed(tmp_path / "trace.gz", parts())
    assert path.stat().st_size < 3 << 20
    answer, peak = read_apart(path)
    assert says in answer["error"]
    assert peak < 256 << 20


def test_memory_limit(tmp_path: Path) -> None:
    """A trace whose events need more memory than its reader may take gives an error with the limit, and that is what it takes at most."""
    before, after = json.dumps(kernel("NAME", 1, 2)).split("NAME")
    names = (f"{n}".ljust(200, "x") for n in range(200_000))
    path = packed(tmp_path / "trace.gz", (f"{before}{name}{after}," for name in names))
    answer, peak = read_apart(path, 80 << 20)
    assert "reading it takes more than 80 MiB of memory" in answer["error"]
    assert peak < 80 << 20
    assert trace_overlap.MOST_BYTES <= 512 << 20


@pytest.mark.parametrize("limit", ["MOST_EVENTS", "_MOST_GROUPS"])
def test_too_much_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    """A trace with more events or groups than any has gives an error."""
    monkeypatch.setattr(trace_overlap, limit, 100)
    events = [json.dumps(kernel(ALL_REDUCE, n, n + 1) | {"args": {"Process Group Name": f"g{n}"}}) for n in range(101)]
    path = packed(tmp_path / "trace.gz", [",".join(events), "]}"])
    trace_overlap.main([str(path), str(BASE), str(BASE + 10**9)])
    assert "it has more than 100 " in json.loads(capsys.readouterr().out)["error"]


def test_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of exposed communication in more pieces than the agent is to hold, the sum is known and the pieces are left out."""
    monkeypatch.setattr(trace_overlap, "_MOST_PIECES", 2)
    many = [kernel(ALL_REDUCE, n, n + 0.5) for n in range(3)]
    found = overlap({"traceEvents": many, "baseTimeNanoseconds": BASE}, BASE, BASE + 10_000)
    assert found.exposed_s == pytest.approx(1.5e-6)
    assert found.exposed == []


@pytest.mark.parametrize("last", [False, True])
def test_place_of_the_base_time(tmp_path: Path, last: bool) -> None:
    """The zero of the times is found before the events and after them."""
    parts = [f'"baseTimeNanoseconds": {BASE}', f'"traceEvents": [{json.dumps(kernel(ALL_REDUCE, 10, 20))}]']
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(f"{{{','.join(parts[::-1] if last else parts)}}}".encode()))
    answer, _ = read_apart(path)
    assert answer["comm_s"] == pytest.approx(10e-6)
