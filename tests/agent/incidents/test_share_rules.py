"""Conditions on shares of the step time: at the thresholds, per job, with what is known of them."""

from __future__ import annotations

import pytest

from commwatch_agent.incidents.share_rules import comm_bound, exposed_comm, gpu_underused
from tests.agent.incidents.metric_series import at_end, variants
from tests.alerts.cases import Series, counter, gauge, rank_info, series, share


def comm(value: float, job: str = "j", rank: str = "0", **more: str) -> Series:
    """The communication share of a rank."""
    return gauge("comm_share_ratio", value, job_id=job, rank=rank, **more)


def exposed(value: float, job: str = "j", rank: str = "0", **more: str) -> Series:
    """The exposed share of a rank."""
    return gauge("exposed_comm_share_ratio", value, job_id=job, rank=rank, **more)


def late(value: float, rank: str = "0", **more: str) -> Series:
    """A straggler."""
    return gauge("straggler_wait_ratio", value, job_id="j", rank=rank, group="dp", group_id="d", **more)


def waits(each_s: float, rank: str = "0", group: str = "dp") -> Series:
    """A rank that waits in a group for so many of each 15 s."""
    return counter("collective_wait_seconds_total", each_s, job_id="j", rank=rank, group=group)


@pytest.mark.parametrize(("value", "number"), [(0.3, 0), (0.301, 1), (0.6, 1)])
def test_comm_share_at_the_threshold(value: float, number: int) -> None:
    """A job is bound by communication above the threshold, not at it, and one condition has the value for all rows."""
    found = at_end(comm_bound, share(value))
    assert [one.value for one in found] == pytest.approx([value] * number)


def test_two_jobs() -> None:
    """Jobs are judged each by itself: one is bound, another hides its communication, a third communicates little."""
    loud, quiet = comm(0.4, "a") | comm(0.6, "a", "1") | exposed(0.3, "a"), comm(0.8, "b") | exposed(0.02, "b")
    found = at_end(comm_bound, loud, quiet, comm(0.1, "c"))
    assert {one.job_id: (one.variant, one.value) for one in found} == {"a": ("", 0.5), "b": ("quiet", 0.8)}
    assert [dict(one.labels) for one in found] == [{"job_id": "a"}, {"job_id": "b"}]


def test_what_it_costs() -> None:
    """A job loses what compute waits for; if that is not known, at most its share, and of idle ranks nothing is known."""
    (known,) = at_end(comm_bound, share(0.5), exposed(0.2), exposed(0.2, rank="1"))
    (unknown,) = at_end(comm_bound, share(0.5))
    assert [known.share, known.idle_ranks] == pytest.approx([0.2, 2 * 0.2])
    assert (unknown.share, unknown.idle_ranks) == (0.5, None)


def test_in_words() -> None:
    """The sentence has the parts of the share: what ranks wait for, and what compute waits for."""
    (plain,) = at_end(comm_bound, share(0.5))
    assert plain.says == "communication takes 50% of the step time"
    alive = rank_info() | rank_info(rank="1")
    (waiting,) = at_end(comm_bound, share(0.5), exposed(0.15), waits(6), waits(0, "1"), alive)
    assert waiting.says == (
        "communication takes 50% of the step time: 30% transfer, 20% waiting for late ranks; compute waits for it 15% of the time"
    )
    (straggler,) = at_end(comm_bound, share(0.5), late(0.45, "3"), late(0.1, "5"))
    assert straggler.says == "communication takes 50% of the step time: 5% transfer, 45% waiting for ranks 3, 5"
    assert dict(straggler.numbers) == {"waiting": 0.45}


def test_waiting_is_a_part_of_the_share() -> None:
    """Waiting counts for ranks that live, in all their groups; it is at most the share, and left out where it is little."""
    alive = rank_info() | rank_info(rank="1")
    both = waits(3, group="dp") | waits(3, group="tp") | waits(0, "1")
    gone = waits(15, "7")
    (found,) = at_end(comm_bound, share(0.5), both, gone, alive)
    assert found.numbers["waiting"] == pytest.approx(0.2)
    (most,) = at_end(comm_bound, share(0.5), waits(12), rank_info())
    assert most.numbers["waiting"] == pytest.approx(0.5)
    (enough,) = at_end(comm_bound, share(0.5), waits(0.75), rank_info())
    assert enough.numbers["waiting"] == 0.05
    (little,) = at_end(comm_bound, share(0.5), waits(0.6), rank_info())
    assert "waiting" not in little.numbers


def test_waiting_after_a_restart() -> None:
    """Waiting that a new life of a rank counts from 0 is not negative, and not the whole of it."""
    again = series("commwatch_collective_wait_seconds_total", "100+3x85 0+3x2", job_id="j", rank="0", group="dp")
    (found,) = at_end(comm_bound, comm(0.5), again, rank_info())
    assert found.numbers["waiting"] == pytest.approx(3 * 3 / (4 * 15))


def test_waiting_of_the_time_of_the_share() -> None:
    """The waiting is of the last minute, as the share is: neither what was before nor the time before the job began changes it."""
    name, about = "commwatch_collective_wait_seconds_total", {"job_id": "j", "rank": "0", "group": "dp"}
    for values in ("0+0x83 0+4.5x4", "0+9x83 756+4.5x4", "_x85 7+4.5x3"):
        (found,) = at_end(comm_bound, share(0.5), series(name, values, **about), rank_info())
        assert found.says == "communication takes 50% of the step time: 20% transfer, 30% waiting for late ranks"


def test_mean_over_all_ranks() -> None:
    """A late rank does not wait itself: of three ranks, two wait 45%, which is 30% of the time of all."""
    three = comm(0.48) | comm(0.48, rank="1") | comm(0.06, rank="2")
    (found,) = at_end(comm_bound, three, late(0.45, "2"))
    assert found.says == "communication takes 34% of the step time: 4% transfer, 30% waiting for rank 2"


def test_measured_waiting() -> None:
    """Waiting that is measured over the time of the share, and explains it, counts rather than what a straggler costs over a shorter time."""
    alive = rank_info() | rank_info(rank="1")
    for cost, each_s, expected in ((0.55, 4.5, "20% transfer, 30%"), (0.45, 3, "5% transfer, 45%")):
        (found,) = at_end(comm_bound, share(0.5), waits(each_s), waits(each_s, "1"), alive, late(cost, "3"))
        assert found.says == f"communication takes 50% of the step time: {expected} waiting for rank 3"


def test_more_waiting_than_communication() -> None:
    """What a straggler costs is of a shorter time than the share: if it is as much, the transfer is not known, so it is not called 0%."""
    for cost, parts in ((0.5, ": mostly waiting for rank 3"), (0.55, ": mostly waiting for rank 3"), (0.9, "")):
        (found,) = at_end(comm_bound, share(0.5), late(cost, "3"))
        assert found.says == f"communication takes 50% of the step time{parts}"
        assert found.numbers["waiting"] == 0.5


def test_quiet_for_five_minutes() -> None:
    """What was hidden, or was waiting for one rank, at some time of the last five minutes needs no warning; earlier does not count."""
    for name, low, high in (("exposed_comm_share_ratio", 0.05, 0.2), ("straggler_wait_ratio", 0.3, 0.0)):
        for ago, expected in ((20, "quiet"), (21, "")):
            values = f"{low}x{88 - ago} {high}x{ago - 1}"
            found = at_end(comm_bound, share(0.5), series(f"commwatch_{name}", values, job_id="j", rank="0"))
            assert variants(found) == [expected], (name, ago)


def test_quiet_is_remembered_of_series_that_end() -> None:
    """A straggler that is no longer one, and an exposed share that is no longer known, count for five minutes."""
    was_late = series("commwatch_straggler_wait_ratio", "0.4x79 stale", job_id="j", rank="0")
    was_hidden = series("commwatch_exposed_comm_share_ratio", "0.05x79 stale", job_id="j", rank="0")
    for there in (was_late, was_hidden):
        (found,) = at_end(comm_bound, share(0.5), there)
        assert (found.variant, dict(found.numbers)) == ("quiet", {})


def test_edges_of_quiet() -> None:
    """Half of the share is enough for a straggler, and the exposed share of a moment is the mean of all ranks."""
    (half,) = at_end(comm_bound, share(0.5), late(0.25))
    (less,) = at_end(comm_bound, share(0.5), late(0.2499))
    assert [(one.variant, one.numbers["waiting"]) for one in (half, less)] == [
        ("quiet", 0.25 / 2), ("", 0.2499 / 2),
    ]  # fmt: skip
    mean, at_the_threshold = exposed(0.05) | exposed(0.12, rank="1"), exposed(0.1)
    assert variants(at_end(comm_bound, share(0.5), mean)) == ["quiet"]
    assert variants(at_end(comm_bound, share(0.5), at_the_threshold)) == [""]


def test_late_in_turn() -> None:
    """Half of the share is enough for all late ranks together, although none of them is a straggler, or each for less than half."""
    alive = rank_info() | rank_info(rank="1")
    for each_s, expected in ((3.76, "quiet"), (3.74, "")):
        for others in ({}, late(0.1) | late(0.1, "1")):
            found = at_end(comm_bound, share(0.5), waits(each_s), waits(each_s, "1"), alive, others)
            assert variants(found) == [expected]


def test_shares_of_an_ended_job() -> None:
    """A job whose series are gone has no condition."""
    assert at_end(comm_bound, series("commwatch_comm_share_ratio", "0.9x80 stale _x3", job_id="j", rank="0")) == []


def test_exposed_comm() -> None:
    """Exposed communication counts by itself, above its threshold; all communication is named if it is known."""
    (found,) = at_end(exposed_comm, exposed(0.3), exposed(0.2, rank="1"), share(0.4))
    assert (found.value, found.share, found.idle_ranks) == (0.25, 0.25, 0.5)
    assert found.says == "compute waits for communication 25% of the step time; all communication takes 40%"
    (alone,) = at_end(exposed_comm, exposed(0.3), exposed(0.1, job="k"))
    assert (alone.job_id, alone.says, dict(alone.numbers)) == (
        "j",
        "compute waits for communication 30% of the step time",
        {},
    )
    assert at_end(exposed_comm, exposed(0.2)) == []


def test_gpu_underused() -> None:
    """GPUs count as often as ranks compute on them, only those of the job, and only while communication is the bottleneck."""
    gpus = gauge("gpu_utilization_ratio", 0.2, gpu="0") | gauge("gpu_utilization_ratio", 0.8, gpu="1")
    idle = gauge("gpu_utilization_ratio", 0.0, gpu="2")
    ranks = rank_info() | rank_info(rank="1") | rank_info(rank="2", gpu="1") | rank_info(rank="3", gpu="")
    (found,) = at_end(gpu_underused, gpus, idle, ranks, share(0.4))
    assert [found.value, found.numbers["share"]] == pytest.approx([0.4, 0.4])
    assert found.says == "the GPUs run kernels 40% of the time, while communication takes 40% of the step time"
    assert found.evidence[0].text == "utilization 40%: mean of the GPUs of 3 ranks over five minutes"
    assert at_end(gpu_underused, gpus, ranks, share(0.3)) == []
    assert at_end(gpu_underused, gpus, ranks) == []
    assert at_end(gpu_underused, gpus, share(0.4)) == []


def test_gpu_that_is_busy_now() -> None:
    """The utilization is a mean over five minutes, not that of a moment."""
    now = series("commwatch_gpu_utilization_ratio", "0x87 1", gpu="0")
    assert [one.value for one in at_end(gpu_underused, now, rank_info(), share(0.4))] == pytest.approx([1 / 21])


def test_gpus_of_two_nodes() -> None:
    """GPUs of one index on two nodes are different ones."""
    here, there = ({"instance": name, "gpu": "0"} for name in ("a:9477", "b:9477"))
    gpus = gauge("gpu_utilization_ratio", 0.1, **here) | gauge("gpu_utilization_ratio", 0.5, **there)
    (found,) = at_end(gpu_underused, gpus, rank_info(**here), rank_info(rank="1", **there), share(0.4))
    assert found.value == pytest.approx(0.3)
