"""Outputs of nccl-tests: what is read out of each form of them, and that nothing in a text makes the parser fall.

The fixtures are in the forms that NVIDIA/nccl-tests 2.0 and 2.19.6 print (tests/fixtures/nccl_tests/README.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.proof.nccl_tests import PROGRAMS, Run, parse
from tests.helpers import examples

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl_tests"


def fixture(name: str) -> str:
    """Text of a fixture."""
    return (FIXTURES / name).read_text(encoding="utf-8")


def fixed(value: float, width: int) -> str:
    """As ``getFloatStr`` of nccl-tests' src/util.cu: as many decimals, two at most, as there is room for."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def row(op: str, ranks: int, size: int, time_us: float, wrong: str = "     0") -> str:
    """A line of the table, as ``writeBenchmarkLine...`` print it; in place takes a tenth longer."""
    rooted, reducing = (
        op in ("broadcast", "reduce", "gather", "scatter"),
        op in ("all_reduce", "reduce", "reduce_scatter"),
    )
    sharded = op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    count = size // 4 // (ranks if sharded else 1)
    redop = "sum" if reducing or op == "send" else "none"
    text = f"{size:12d}  {count:12d}  {'float':>8}  {redop:>6}  {0 if rooted else -1:6d}"
    for time in (time_us, time_us * 1.1):
        algbw = size / time / 1e3
        busbw = algbw * (bus_factor(op, ranks) or 0)
        text += f"  {fixed(time, 7)}  {fixed(algbw, 6)}  {fixed(busbw, 6)}  {wrong}"
    return text


def micros(run: Run) -> dict[int, float]:
    """Microseconds by size, as printed in the text."""
    return {size: round(time * 1e6, 3) for size, time in run.times_s.items()}


def rounded(runs: list[Run]) -> list[Run]:
    """Runs with their times in microseconds."""
    return [run._replace(times_s=micros(run)) for run in runs]


def header(program: str, ranks: int, hosts: int = 1) -> list[str]:
    """The lines before the table."""
    devices = [
        f"#  Rank {rank:2d} Group  0 Pid {1000 + rank:6d} on {f'node{rank * hosts // ranks}':>10} device {rank:2d} [0000:{rank:02x}:00] GPU"
        for rank in range(ranks)
    ]
    return [
        "# nccl-tests version 2.19.6 nccl-headers=23005 nccl-library=23005",
        f"# Collective test starting: {program}_perf",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
        *devices,
        "#",
        "#                                                             out-of-place                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
    ]


# -- what is read -------------------------------------------------------------------------------


def test_several_runs_between_other_output() -> None:
    """Runs of several programs, tagged by mpirun and mixed with NCCL's lines, are each parsed completely; a torn line is left out and reported."""
    runs, remarks = parse(fixture("mixed-2.19.6.txt"))
    assert [(run.op, run.group_size, run.hosts) for run in runs] == [
        ("all_reduce", 8, ("node0", "node1")),
        ("all_gather", 8, ("node0", "node1")),
        ("all_to_all", 8, ("node0", "node1")),
        ("send", 8, ("node0", "node1")),
        ("recv", 8, ("node0", "node1")),
    ]
    assert micros(runs[0]) == {
        1048576: 69.2, 4194304: 105.5, 67108864: 864.1, 268435456: 3295.2,
    }  # fmt: skip
    assert micros(runs[1]) == {1048576: 35.62, 16777216: 134.7, 268435456: 1720.4}
    assert runs[3].times_s == runs[4].times_s
    assert len(remarks) == 1
    assert "1 line left out: torn" in remarks[0]


def test_old_form() -> None:
    """Version 2.0 names neither program nor rank's group, and prints another algbw: what the columns betray is read all the same."""
    runs, remarks = parse(fixture("old-2.0.txt"))
    assert rounded(runs) == [
        Run("all_reduce", 4, ("node0",), {1048576: 56.0, 134217728: 2133.0}),
        Run("broadcast", 4, ("node0",), {1048576: 31.5, 134217728: 1400.1}),
        Run("reduce_scatter", 4, ("node0",), {1048576: 33.1, 134217728: 1066.5}),
    ]
    assert remarks == ["a run of 4 ranks: the operation is unknown; name it with --ops"]
    assert parse(fixture("old-2.0.txt"), "all_gather").runs[-1].op == "all_gather"


def test_json_form() -> None:
    """The file of -J says the same as the text."""
    runs, remarks = parse(fixture("reduce_scatter-2.19.6.json"))
    assert rounded(runs) == [Run("reduce_scatter", 4, ("node0", "node1"), {1048576: 52.25, 16777216: 301.125})]
    assert remarks == []


def test_json_of_several_gpus_a_process() -> None:
    """The file of -J lists one device of each process: the others are counted by -t and -g."""
    found = json.loads(fixture("reduce_scatter-2.19.6.json"))
    found["config"].update(ngpus=2, devices=found["config"]["devices"][::2])
    ((run,), _) = parse(json.dumps(found))
    assert (run.group_size, run.hosts) == (4, ("node0", "node1"))


def test_per_iteration_columns() -> None:
    """With -I and -T there are more columns and a time of day: the same are read."""
    runs, remarks = parse(fixture("per_iteration-2.19.6.txt"))
    assert rounded(runs) == [Run("all_reduce", 2, ("node0",), {1048576: 40.5, 2097152: 72.1})]
    assert remarks == []


def test_what_cannot_be_used_is_told() -> None:
    """Wrong results, an operation that is none of torch's, a lone rank and missing device lines are left out, each with its reason."""
    runs, remarks = parse(fixture("useless-2.19.6.txt"))
    assert rounded(runs) == [Run("reduce", 2, ("node0",), {2097152: 80.0})]
    said = "\n".join(remarks)
    for part in (
        "1 line left out: wrong results",
        "hypercube",
        "one rank",
        "missing",
        "not that of the operation",
    ):
        assert part in said
    assert parse("").remarks == parse("hello\n").remarks == ["no output of nccl-tests in it"]


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_every_program(program: str) -> None:
    """The output of each program is parsed to seconds, under the canonical name, with the size as printed in the table."""
    op = PROGRAMS[program][0]
    times = {4096: 21.5, 1 << 20: 60.25, 1 << 30: 4321.0}
    lines = [*header(program, 8), *(row(op, 8, size, time) for size, time in times.items())]
    runs, remarks = parse("\n".join(lines))
    assert [run.op for run in runs] == list(PROGRAMS[program])
    assert remarks == []
    for run in runs:
        assert run.times_s == pytest.approx({size: time / 1e6 for size, time in times.items()}, rel=1e-3)


def test_fastest_of_several() -> None:
    """Of a size that was measured several times the fastest counts, as printed out of place."""
    lines = [*header("all_reduce", 2), row("all_reduce", 2, 4096, 30.0), row("all_reduce", 2, 4096, 25.0)]
    assert parse("\n".join(lines)).runs[0].times_s == {4096: 25e-6}


def test_only_the_group_of_rank_0() -> None:
    """With NCCL_TESTS_SPLIT ranks are in several groups: the size is that of one."""
    lines = header("all_reduce", 8)
    split = [line.replace("Group  0", f"Group  {i % 2}") if "Rank" in line else line for i, line in enumerate(lines)]
    assert parse("\n".join([*split, row("all_reduce", 4, 1 << 20, 50.0)])).runs[0].group_size == 4


# -- garbage ------------------------------------------------------------------------------------

WHOLE = [fixture(path.name) for path in sorted(FIXTURES.glob("*-*"))]


@examples(200)
@given(st.text())
def test_any_text(text: str) -> None:
    """Nothing in a text makes it raise."""
    parse(text)
    parse("{" + text)


@examples(200)
@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.integers(0, 5000), st.text(max_size=8)), max_size=8))
def test_damaged_output(text: str, cuts: list[tuple[int, str]]) -> None:
    """Damage somewhere in an output makes no time appear that is not positive, and does not raise."""
    for at, put in cuts:
        text = text[:at] + put + text[at + len(put) :]
    for run in parse(text).runs:
        assert run.times_s
        assert all(size > 0 < time for size, time in run.times_s.items())
        assert run.group_size > 1


@examples(100)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["results", "config", "devices", "out_of_place", "time", "size", "rank", "args", "bus_bw"]), inner)))  # fmt: skip
def test_any_json(found: object) -> None:
    """No JSON makes it raise."""
    parse(json.dumps({"results": [found], "config": found, "args": [found]}))
    parse(json.dumps({"results": found, "config": {"devices": [found]}}))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nested_json(opening: str) -> None:
    """JSON that is nested without end does not make it raise."""
    parse(opening * 100_000)


def test_more_devices_than_there_are() -> None:
    """Lines that claim an impossible number of devices do not take memory for each device."""
    devices = [{"rank": at << 16, "group": 0, "hostname": "node"} for at in range(4000)]
    place = {"time": 10.0, "bus_bw": 1.0, "nwrong": 0}
    found = {
        "results": [{"size": 1024, "redop": "sum", "root": "-1", "out_of_place": place}],
        "config": {"nthreads": 256, "ngpus": 256, "devices": devices},
        "args": ["all_reduce_perf"],
    }
    assert f"all_reduce of {2 << 16} ranks: 3998 lines left out: torn" in parse(json.dumps(found)).remarks
