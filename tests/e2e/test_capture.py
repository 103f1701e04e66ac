"""Identity, steps, waits and exposure as a real job shows them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from commwatch.wire import events as ev
from tests.e2e.torchjob import alone, digest, read_rings, results, run_job

ANY_TIME = 2**62


def test_identity(tmp_path: Path) -> None:
    """Groups with one description, plain groups and groups made again keep their identity apart, alike on all ranks, and are joined by it."""
    run_job(tmp_path, "identity.py", str(tmp_path), nproc=4)
    ranks = read_rings(tmp_path)
    assert len(ranks) == 4
    members: dict[str, set[int]] = {}
    sizes: dict[str, list[int]] = {}
    for rank in ranks:
        assert all(group["aligned"] for group in rank.groups.values())
        for record in rank.of("all_reduce"):
            group = rank.groups[record.group]
            members.setdefault(group["group_id"], set()).add(rank.rank)
            assert rank.rank in group["ranks"]
            assert record.size_bytes // 4 not in sizes.setdefault(f"{rank.rank} {group['group_id']}", [])
            sizes[f"{rank.rank} {group['group_id']}"].append(record.size_bytes // 4)
        # The send or recv between two collectives does not count in the collectives' numbers.
        last = [r for r in rank.of("all_reduce") if r.size_bytes == 28]
        assert [r.seq for r in last] == [0, 0]
    # A life has two dp, two tp and two further tp groups, two plain groups and the world: nine, and nine again.
    assert len(members) == 18
    assert sorted(len(ranks) for ranks in members.values()) == [2] * 12 + [4] * 6
    # Different sizes were used in each group, so a mix-up would show as a second size.
    assert all(len(used) == 1 for used in sizes.values())
    descriptions = [group["desc"] for group in ranks[0].groups.values()]
    assert len(descriptions) > len(set(descriptions))
    # Every collective of every group is joined with exactly the ranks of its own group.
    agent, _ = digest(tmp_path)
    joined = agent.groups(None)
    assert all(view.aligned and view.ranks == view.members for view in joined)
    for view in joined:
        operations, waits = agent.collective(view.group_id, 0) or ([], None)
        assert [o.rank for o in operations] == view.members
        assert len({o.size_bytes for o in operations}) == 1
        assert waits is not None


def test_install_by_hand_after_use(tmp_path: Path) -> None:
    """A group used before the probe came is counted and marked unaligned; one made later is not."""
    run_job(tmp_path, "install_late.py", COMMWATCH="0")
    for rank in read_rings(tmp_path):
        aligned = {group["name"]: group["aligned"] for group in rank.groups.values()}
        assert aligned == {"0": False, "1": True}
        assert rank.of("all_reduce")[0].flags & 16
    agent, _ = digest(tmp_path)
    old, new = sorted(agent.groups(None), key=lambda group: group.name)
    assert (agent.collective(old.group_id, 0) or ([], None))[1] is None
    assert (agent.collective(new.group_id, 0) or ([], None))[1] is not None


@pytest.mark.parametrize(
    ("kind", "rounds", "expected"),
    [
        ("plain", 12, 11), ("zero", 12, 11), ("two", 12, 11), ("groups", 12, 11), ("accumulate", 12, 11), ("gan", 12, 11),
        ("quick", 100, 99), ("explicit", 12, 5),
    ],
)  # fmt: skip
def test_steps(kind: str, rounds: int, expected: int, tmp_path: Path) -> None:
    """So many rounds are one step less (the first mark starts the clock), however the optimizers are arranged."""
    run_job(tmp_path, "steps.py", kind, str(rounds))
    agent, _ = digest(tmp_path)
    (job,) = agent.jobs()
    steps = agent.steps(0, ANY_TIME, job.job_id, 0, 1000)
    assert len(steps) == expected
    assert job.steps_unavailable is None
    assert all(step.comm_s is not None and 0 < step.comm_s < step.duration_s for step in steps)
    passes = {"accumulate": 4, "explicit": 2, "gan": 2}.get(kind, 1)
    assert all(step.duration_s > 0.9 * (0.002 if kind == "quick" else 0.03) * passes for step in steps)


def test_steps_of_a_critic(tmp_path: Path) -> None:
    """Five calls of a discriminator and one of the generator are a step, those before its first call, too."""
    run_job(tmp_path, "steps.py", "critic", "12")
    agent, _ = digest(tmp_path)
    (job,) = agent.jobs()
    lasted = [step.duration_s for step in agent.steps(0, ANY_TIME, job.job_id, 0, 1000)]
    assert job.steps_unavailable is None
    assert len(lasted) == 11
    assert min(lasted) > 0.9 * 0.03 * 6


def test_steps_in_no_order(tmp_path: Path) -> None:
    """Optimizers called at random have no steps, and the reason and the remedy are given."""
    run_job(tmp_path, "steps.py", "random", "40")
    agent, _ = digest(tmp_path)
    (job,) = agent.jobs()
    assert agent.steps(0, ANY_TIME, job.job_id, 0, 1000) == []
    assert "commwatch.step()" in (job.steps_unavailable or "")


def test_late_rank_is_named(tmp_path: Path) -> None:
    """Rank 1, made 50 ms late, is named for every symmetric operation; a root that needs it waits for it, and others do not."""
    run_job(tmp_path, "late.py", nproc=3)
    agent, aggregate = digest(tmp_path)
    (group,) = agent.groups(None)
    symmetric, others, lined_up = 0, 0, False
    for seq in range(10**6):
        found = agent.collective(group.group_id, seq)
        if found is None:
            break
        operations, waits = found
        rings = {book.rank: (book.read, book.lost, book.closed_properly) for book in aggregate.rank_totals()}
        assert [o.rank for o in operations] == [0, 1, 2], f"number {seq} of {operations[0].op}, rings: {rings}"
        # A monitored_barrier lines the ranks up again, after whatever rank 1 has done to them.
        was_lined_up, lined_up = lined_up, operations[0].timing == "call"
        if lined_up:
            continue
        if operations[0].op in ("broadcast", "reduce", "gather", "scatter"):
            assert waits is None
            others += 1
        elif was_lined_up:
            assert waits is not None
            assert waits.late.rank == 1, operations[0].op
            assert waits.lateness_ns > 25e6
            symmetric += 1
    assert symmetric == 5 * 3
    assert others == 4 * 4
    _, rows = agent.summary(0, ANY_TIME, ["op", "rank"], {})
    waited = {(row.by["op"], row.by["rank"]): row.wait_s for row in rows}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert min(waited[op, 0] or 0, waited[op, 2] or 0) > 3 * 0.03
    for op in ("reduce", "gather"):
        assert (waited[op, 0] or 0) > 3 * 0.03
        assert waited[op, 2] == 0
    assert waited["broadcast", 0] == waited["scatter", 0] == 0
    assert (waited["broadcast", 2] or 0) < 0.03
    assert (waited["scatter", 2] or 0) > 0.03  # for the root, which first waits for rank 1 in the gather before
    assert waited["recv", 0] is None
    p2p = next(row for row in rows if row.by == {"op": "recv", "rank": 0})
    assert (p2p.p2p_wait_s or 0) > 0.03
    lateness = {book.rank: sum(book.lateness_ns.values()) for book in aggregate.rank_totals()}
    assert lateness[1] > 15 * 25e6
    assert lateness[1] > 3 * max(lateness[0], lateness[2])


@pytest.mark.by_the_clock
def test_exposed_when_standing(tmp_path: Path) -> None:
    """A DDP rank that is idle while the other is 300 ms late shows that time as exposed."""
    run_job(tmp_path, "exposed.py", "stand")
    agent, _ = digest(tmp_path)
    waiting, late = (agent.steps(0, ANY_TIME, None, rank, 100) for rank in (0, 1))
    assert len(waiting) == len(late) == 4
    assert all((step.exposed_s or 0) > 0.25 for step in waiting)
    # On a busy machine a thread that computes can lose its core in single steps, so the late rank is judged by the median.
    assert median(step.exposed_s for step in late if step.exposed_s is not None) < 0.1


@pytest.mark.by_the_clock
def test_not_exposed_when_computing(tmp_path: Path) -> None:
    """The same wait behind compute is communication time, and of it only what the thread did not compute is exposed."""
    standing = results(run_job(tmp_path, "exposed.py", "compute"))[0]
    agent, _ = digest(tmp_path)
    steps = agent.steps(0, ANY_TIME, None, 0, 100)
    assert all(step.comm_s is not None and step.comm_s > 0.25 for step in steps)
    exposed, comm = (sum(getattr(step, name) or 0 for step in steps) for name in ("exposed_s", "comm_s"))
    # What the job's own clocks say it stood still: next to nothing, unless others use the machine's cores.
    assert exposed < sum(standing) + 0.1 * comm


def test_training_is_untouched(tmp_path: Path) -> None:
    """Losses and weights are bit for bit the same with and without the probe."""
    watched = results(run_job(tmp_path / "on", "train.py"))
    alone = results(run_job(tmp_path / "off", "train.py", COMMWATCH="0"))
    assert watched == alone
    assert len(read_rings(tmp_path / "on")) == 2
    assert not (tmp_path / "off").exists()


def test_tags(tmp_path: Path) -> None:
    """Sends to a peer are numbered by tag, for as many tags as programs use; a tag for each send costs no memory and no time."""
    done = alone(tmp_path, "tags.py")
    assert (done.returncode, done.stderr) == (0, "")
    (rank,) = read_rings(tmp_path)
    sends = [(record.tag, record.seq) for record in rank.of("send")]
    assert sends[:7] == [(0, 0), (0, 1), (5, 0), (-1, 0), (5, 1), (256, 0), (0, 0)]
    assert sends[7:] == [(tag, 0) for tag in range(1000, 6000)]


def test_many_peers(tmp_path: Path) -> None:
    """Peers beyond the limit have no place of their own: their sends are recorded and numbered together, without a peer."""
    done = alone(tmp_path, "many_peers.py", COMMWATCH_SLOTS=str(1 << 15))
    assert (done.returncode, done.stderr) == (0, "")
    (rank,) = read_rings(tmp_path)
    sends = [(record.peer, record.seq) for record in rank.of("send")]
    assert sends[: ev.MOST_PEERS] == [(peer, 0) for peer in range(1, ev.MOST_PEERS + 1)]
    assert sends[ev.MOST_PEERS :] == [(-1, 0), (-1, 1), (-1, 2), (1, 1), (-1, 3)]
