"""Changes of the exchange of gradients: no byte is lost, and known jobs become known other jobs."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.whatif.answers import forecast, study
from commwatch_agent.whatif.changes import FEWER, replica_ranks, with_ranks
from commwatch_agent.whatif.exchange import accumulated, compressed, replicated, sharded, with_buckets
from commwatch_agent.whatif.model import CannotAnswer, Do, Kind, Model, recosted
from commwatch_agent.whatif.pages import basis, text
from commwatch_agent.whatif.replay import replay
from tests.agent.whatif.scenes import grid, hybrid, model
from tests.helpers import examples

MIB = 1 << 20
SIZES = st.lists(st.integers(1 << 16, 8 * MIB), min_size=1, max_size=5)


def _step_s(of: Model) -> float:
    return median(step.duration_s for step in replay(of))


def _bytes(of: Model, step: int = 1) -> dict[str, float]:
    """Bytes of the operations that a rank launches in a step, by operation."""
    found: dict[str, float] = {}
    for do in of.programs[0][step]:
        if do.kind == Kind.LAUNCH:
            op = of.ops[do.op]
            found[op.op] = found.get(op.op, 0.0) + op.size_bytes
    return found


def _launches(of: Model, step: int = 1) -> list[tuple[float, str, float]]:
    """After how many seconds of compute a rank launches the operations of a step, with their kinds and sizes."""
    clock_s, found = 0.0, []
    for do in of.programs[0][step]:
        clock_s += do.seconds if do.kind == Kind.COMPUTE else 0.0
        found += [(clock_s, of.ops[do.op].op, of.ops[do.op].size_bytes)] if do.kind == Kind.LAUNCH else []
    return found


@given(SIZES, st.integers(1 << 16, 32 * MIB))
@examples(60)
def test_buckets_keep_all_bytes(sizes: list[int], bucket: int) -> None:
    """Other buckets carry the same bytes, none more than its size; each rank waits for each of them."""
    job = with_buckets(model(sizes=sizes), bucket)
    assert _bytes(job)["all_reduce"] == pytest.approx(sum(sizes))
    program = job.programs[0][1]
    launched = [do.op for do in program if do.kind == Kind.LAUNCH]
    assert max(job.ops[number].size_bytes for number in launched) <= bucket
    assert sorted(do.op for do in program if do.kind == Kind.WAIT) == sorted(launched)
    compute = sum(do.seconds for do in program if do.kind == Kind.COMPUTE)
    assert compute == pytest.approx(
        sum(do.seconds for do in model(sizes=sizes).programs[0][1] if do.kind == Kind.COMPUTE)
    )


def test_buckets_of_several_backward_passes() -> None:
    """Buckets of different backward passes of a step stay apart, also those of two models; and the passes keep their places."""
    names = ("bucket 0: b", "bucket 1: a") * 2
    job = with_buckets(model(sizes=(4 * MIB, MIB) * 2, names=names), 100 * MIB)
    assert [size for _, _, size in _launches(job)] == [5 * MIB, 5 * MIB]
    one = model(sizes=(MIB,) * 3, names=("bucket 0: weight",) * 3)
    assert _step_s(with_buckets(one, 25 * MIB)) == pytest.approx(_step_s(one))
    assert any("one backward pass" in each for each in with_buckets(model(sizes=(MIB,) * 3), 25 * MIB).assumed)
    two = with_buckets(model(sizes=(MIB, MIB), names=("bucket 0: generator", "bucket 0: critic")), 25 * MIB)
    assert _bytes(two)["all_reduce"] == 2 * MIB
    assert len(_launches(two)) == 2
    split = _launches(with_buckets(model(sizes=(4 * MIB,) * 2, names=("bucket 0: weight",) * 2), MIB))
    # The first third of a micro-step is its forward pass.
    assert [at_s for at_s, _, _ in split] == pytest.approx(
        [0.020 * (n + 1 / 3 + k / 6) for n in (0, 1) for k in range(1, 5)]
    )


@pytest.mark.parametrize(
    ("sizes", "cap", "is_same"),
    [
        ((1.2, 26, 30, 9), 25, True),  # the defaults of DDP
        ((1.2, 9), 25, True),
        ((1.2, 26, 160), 25, True),  # an embedding is not divided
        ((4.1, 4.1, 4.1, 2), 4, True),
        ((4.1, 4.1, 4.1, 2), 25, False),
        ((4, 4), 25, False),
        ((1.2, 26, 30, 9), 1, False),
        ((1.2, 9), 100, False),  # of which DDP makes one
    ],
)
def test_buckets_that_the_job_has(sizes: tuple[float, ...], cap: float, *, is_same: bool) -> None:
    """A size that the job's buckets have already changes nothing, and the answer has that: DDP's first bucket is smaller by default."""
    names = [f"bucket {n}: a … b (3 parameters)" for n in range(len(sizes))]
    job = model(sizes=[int(each * MIB) for each in sizes], names=names)
    after = with_buckets(job, cap * MIB)
    assert (after.programs == job.programs) == is_same
    assert any("as DDP makes them of this size" in each for each in after.assumed) == is_same


def test_sharding_of_several_backward_passes() -> None:
    """With FSDP in place of DDP, each pass gathers its units; those of the second one after the first one."""
    job = model(sizes=(4 * MIB, 4 * MIB) * 2, names=("bucket 0: b", "bucket 1: a") * 2)
    after = sharded(job)
    assert _bytes(after) == {"all_gather": 8 * 4 * MIB, "reduce_scatter": 4 * 4 * MIB}
    gathered_s = [at_s for at_s, op, _ in _launches(after) if op == "all_gather"]
    assert [at_s > 0.040 - 1e-6 for at_s in gathered_s] == [False] * 4 + [True] * 4


@given(SIZES, st.floats(0.01, 1))
@examples(40)
def test_compression(sizes: list[int], part: float) -> None:
    """So much of the bytes is left, and a step is not longer; packing that takes time makes it longer."""
    job = model(sizes=sizes)
    small = compressed(job, part)
    assert _bytes(small)["all_reduce"] == pytest.approx(part * sum(sizes))
    assert _step_s(small) <= _step_s(job) + 1e-9
    assert _step_s(compressed(job, part, 1e-7)) > _step_s(small)


def test_fp16_halves_float32() -> None:
    """Values of four bytes become values of two."""
    job = model()
    assert _bytes(compressed(job, "fp16"))["all_reduce"] == _bytes(job)["all_reduce"] / 2
    assert _bytes(compressed(job, "int8"))["all_reduce"] == _bytes(job)["all_reduce"] / 4


@given(SIZES, st.integers(1, 6))
@examples(40)
def test_accumulation(sizes: list[int], micro_steps: int) -> None:
    """Compute before the exchange happens so many times, and the exchange once."""
    job = model(sizes=sizes, tail_ms=5)
    after = accumulated(job, micro_steps)
    assert _bytes(after) == _bytes(job)
    assert after.samples == micro_steps
    forward_and_backward_s = 0.020 * len(sizes)
    assert _step_s(after) == pytest.approx(_step_s(job) + (micro_steps - 1) * forward_and_backward_s)


def test_unclear_micro_steps() -> None:
    """If an operation is before the exchange of gradients on one rank and after it on another, the micro-steps are not known."""
    job = model(2)
    number = max(job.ops) + 1
    ops = {**job.ops, number: job.ops[0]._replace(op="all_gather", group_id="other", carries="")}
    own = [Do(Kind.LAUNCH, op=number), Do(Kind.WAIT, op=number)]
    first, second = (job.programs[rank][0] for rank in (0, 1))
    programs = {0: [[*own, *first], *job.programs[0][1:]], 1: [[*second, *own], *job.programs[1][1:]]}
    with pytest.raises(CannotAnswer, match="accumulation: some ranks launch an operation before their exchange"):
        accumulated(replace(job, ops=ops, programs=programs), 2)
    both = {rank: [[*own, *steps[0]], *steps[1:]] for rank, steps in job.programs.items()}
    assert _step_s(accumulated(replace(job, ops=ops, programs=both), 2)) > _step_s(job)


def test_micro_steps_that_exchange_gradients() -> None:
    """A step that exchanges the same bucket more than once is no micro-step; one of two models is."""
    with pytest.raises(CannotAnswer, match="accumulation: a step exchanges the same gradients more than once"):
        accumulated(model(sizes=(MIB,) * 4, names=("bucket 0: weight",) * 4), 4)
    assert accumulated(model(sizes=(MIB,) * 2, names=("bucket 0: a", "bucket 0: b")), 4).samples == 4


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_more_ranks(ranks: int) -> None:
    """A job of two ranks becomes the job that has more of them on the same link."""
    sizes = (64 << 10, 4 * MIB, 8 * MIB)
    predicted = with_ranks(model(2, sizes=sizes, compute_ms=300), ranks)
    assert _step_s(predicted) == pytest.approx(_step_s(model(ranks, sizes=sizes, compute_ms=300)), rel=1e-3)
    assert predicted.world_size == ranks


@pytest.mark.parametrize("replicas", [1, 3, 4, 8])
def test_more_replicas(replicas: int) -> None:
    """With hybrid sharding, more ranks are more replicas: the shard group stays, and the job is the one that has so many replicas."""
    job = hybrid(2)
    predicted = with_ranks(job, 2 * replicas)
    assert {(op.group, op.n) for op in predicted.ops.values()} == {
        ("mesh_dp_shard", 2),
        ("mesh_dp_replicate", replicas),
    }
    computes_s, shards_s, reduces_s = 0.110, 0.020 + 0.040, 2 * (replicas - 1) * 0.020 / replicas
    assert _step_s(predicted) == pytest.approx(computes_s + shards_s + reduces_s)


def test_half_a_copy() -> None:
    """A number of ranks that cuts a shard group is refused, and a forecast begins with one copy of the model."""
    with pytest.raises(
        CannotAnswer, match="5 ranks: not a multiple of the 2 ranks of a copy of the model; the shard groups"
    ):
        with_ranks(hybrid(2), 5)
    assert [point.ranks for point in forecast(hybrid(2), {}, 16).points] == [2, 4, 8, 16]
    # A large sum over all ranks is no exchange between replicas; without these, the one group of FSDP grows.
    job = sharded(model(2))
    other = next(op for op in job.ops.values() if op.op == "all_reduce")._replace(group="all", group_id="all")
    job = replace(job, ops={**job.ops, -2: other}, curves={**job.curves, "all": job.curves["dp"]})
    assert {op.n for op in with_ranks(job, 3).ops.values() if op.carries} == {3}


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 4), (4, 2), (2, 4), (2, 3)])
def test_copies_of_a_model(tensor: int, stages: int) -> None:
    """A copy of the model has all ranks of its tensor parallel groups and stages; a forecast has whole copies, and only their exchange grows."""
    job, copy = grid(tensor, stages, 2), tensor * stages
    assert replica_ranks(job) == copy
    assert [point.ranks for point in forecast(job, {}, 4 * copy).points] == [copy, 2 * copy, 4 * copy]
    assert {op.n for op in with_ranks(job, 8 * copy).ops.values() if op.group == "dp"} == {8}
    assert [op for op in with_ranks(job, 8 * copy).ops.values() if op.group != "dp"] == [
        op for op in job.ops.values() if op.group != "dp"
    ]
    with pytest.raises(CannotAnswer, match=f"{copy + 1} ranks: not a multiple of the {copy} ranks of a copy"):
        with_ranks(job, copy + 1)


def test_size_of_what_is_gathered() -> None:
    """More ranks keep the size of what is gathered, and the answer says that it is assumed, but for parameters, whose size is known to stay."""
    job = model(2)
    number, gathered = max(job.ops) + 1, next(iter(job.ops.values()))._replace(op="all_gather", carries="")
    for carries, assumed in (("", 1), ("parameters", 0)):
        more = with_ranks(replace(job, ops={**job.ops, number: gathered._replace(carries=carries)}), 4)
        assert more.ops[number].size_bytes == gathered.size_bytes
        assert sum(each.startswith("what is gathered in group dp keeps its size") for each in more.assumed) == assumed


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 4), (4, 2)])
def test_one_copy_of_a_model(tensor: int, stages: int) -> None:
    """One copy of a model exchanges no gradients with others, so nothing shows what more copies would cost, and there is no forecast."""
    job = grid(tensor, stages, 1)
    for ask in (lambda: with_ranks(job, 2 * tensor * stages), lambda: forecast(job, {}, 1024)):
        with pytest.raises(CannotAnswer, match="no group exchanges gradients between copies of the model"):
            ask()
    assert study("job", job, {}).forecast is None


def test_group_of_one_rank() -> None:
    """The operations of a group of one rank take as long as they did, whatever changes."""
    own = next(iter(model().ops.values()))._replace(n=1, work_s=0.5)
    assert recosted(model(), own, size_bytes=1.0).scale == 1.0


def test_one_rank() -> None:
    """A job of one rank does not communicate, and ranks do not wait for one another."""
    (step, *_) = replay(with_ranks(model(2, late_ms=40, compute_ms=20), 1))
    assert step.comm_s == 0
    assert step.duration_s == pytest.approx((0.065 + 0.105) / 2)


def test_sharding() -> None:
    """Parameters are gathered twice in a step, gradients scattered once, one and a half times the bytes over a link; and back."""
    job = model(sizes=(4 * MIB, 4 * MIB))
    after = sharded(job)
    assert _bytes(after) == {"all_gather": 16 * MIB, "reduce_scatter": 8 * MIB}
    # Blocking on the CPU: all of it is exposed. On Gloo, a reduce_scatter takes as long as an all_reduce.
    compute_s = 0.045
    assert _step_s(after) == pytest.approx(compute_s + 2 * _all_reduce_s(job), rel=0.01)
    back = replicated(after)
    assert _bytes(back) == {"all_reduce": 8 * MIB}
    assert _step_s(back) < _step_s(after)


def _all_reduce_s(of: Model) -> float:
    return sum(of.ops[do.op].work_s for do in of.programs[0][1] if do.kind == Kind.LAUNCH)


@pytest.mark.parametrize(
    "change", [lambda job: with_buckets(job, MIB), sharded, replicated, lambda job: accumulated(job, 2)]
)
def test_nothing_to_change(change: object) -> None:
    """A job without gradients raises an error that names what is missing."""
    with pytest.raises(CannotAnswer, match="no exchange of gradients"):
        change(model(sizes=(100,)))  # type: ignore[operator]


def test_gradients_of_the_other_form() -> None:
    """Where a change is about gradients that are whole, or sharded, and those of the job are not, the error says what the job does instead."""
    whole = model(sizes=(MIB, MIB))
    shards = sharded(whole)
    with pytest.raises(CannotAnswer, match=r"^replication: the job exchanges whole gradients already, as DDP does$"):
        replicated(whole)
    with pytest.raises(CannotAnswer, match=r"^sharding: the job shards its gradients already, as FSDP does$"):
        sharded(shards)
    with pytest.raises(
        CannotAnswer, match=r"^other bucket sizes: buckets are DDP's; the job shards its gradients, as FSDP does$"
    ):
        with_buckets(shards, MIB)
    found = study("job", shards, {})
    assert found.unanswered["buckets of 25 MiB"].endswith("the job shards its gradients, as FSDP does")
    assert {"fp16 gradients"} <= {text for each in found.answers for text in each.changes}


def test_what_a_forecast_assumes() -> None:
    """A number of ranks above the recorded one comes with what it is extrapolated from and what that assumes: in a line at the table, and in answers."""
    assumes = (
        "more ranks are extrapolated from 2 ranks on 1 node with gloo: assumed are links as fast as theirs (between nodes, they are usually slower), "
        "rings, and added ranks no later than these"
    )
    two = model(2)
    job = replace(two, hosts=1, ops={number: op._replace(backend="gloo") for number, op in two.ops.items()})
    found = study("job", job, {})
    lines = text(found, 250)
    assert lines[lines.index("scaling") + 1] == assumes
    assert assumes in found.assumed
    assert sum(assumes in line for line in lines) == 1
    nodes = replace(job, hosts=2, ops={number: op._replace(backend="nccl") for number, op in two.ops.items()})
    assert "2 nodes with nccl: assumed are links as fast as theirs, rings or trees, and" in " ".join(
        text(study("job", nodes, {}), 250)
    )
    assert assumes in study("job", job, {"1024 ranks": lambda one: with_ranks(one, 1024)}).answers[0].assumed
    assert "extrapolated" not in " ".join(study("job", job, {"one": lambda one: with_ranks(one, 1)}).answers[0].assumed)


def test_lateness_counts_as_compute_of_fewer_ranks() -> None:
    """Where a rank is late, a forecast and an answer for fewer ranks mention that its lateness counts as compute; where none is, they do not."""
    late = study("job", model(2, late_ms=40), {})
    assert late.forecast is not None
    one = late.forecast.points[0]
    # The mean of 65 ms, and of 65 ms with 40 ms of lateness.
    assert one.ranks == 1
    assert one.step_s == pytest.approx(0.085)
    assert late.forecast.fewer == FEWER
    assert text(late, 250).count(FEWER) == 1
    even = study("job", model(2), {})
    assert even.forecast is not None
    assert even.forecast.fewer == ""
    assert FEWER not in text(even, 250)
    asked = study("job", model(2, late_ms=40), {"one": lambda job: with_ranks(job, 1)})
    assert FEWER in asked.assumed


def test_ranks_without_cores() -> None:
    """Where main threads waited for a core for a part of the time that matters, a line beneath the table has it with the figure, at any width."""
    for share, shown in ((None, False), (0.0, False), (0.09, False), (0.1, True), (0.62, True)):
        found = study("job", model(2), {}, cores=share)
        assert found.core_wait_share == share
        for cells in (80, 250):
            every = " ".join(text(found, cells))
            assert ("estimates assume that the ranks have CPU cores" in every) == shown
            assert (f"waited {100 * (share or 0):.0f}% of the time" in every) == shown
    lines = text(study("job", model(2), {}, cores=0.62), 250)
    at = next(number for number, line in enumerate(lines) if line.startswith("these estimates"))
    assert lines[at - 1] == ""
    assert lines[at + 1].startswith("80% of steps")


def test_replay_that_is_off() -> None:
    """Where the replay without changes misses the recorded step by more than advice accepts, the answer gives by how much."""
    job = study("job", model(2), {})
    job = replace(job, measured_s=job.replayed_s)
    assert text(job)[1].endswith(" as replayed without changes")
    for times in (0.98, 1.02):
        assert basis(replace(job, replayed_s=job.measured_s * times)).endswith(" as replayed without changes")
    off = basis(replace(job, replayed_s=job.measured_s * 1.05))
    assert off.endswith(": the replay is 5% off, so all gains are rough, and advice does not use them")
