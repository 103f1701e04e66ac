"""The NCCL plugin, called as NCCL calls it, in all versions of the interface, under the sanitizers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.collectors.nccl_plugin.conftest import Built

#: The oldest has no API calls.
OLDEST = "ncclProfiler_v4"
VERSIONS = (OLDEST, "ncclProfiler_v5", "ncclProfiler_v6")
#: Ring and LL128 on two channels, as the driver's collectives; its messages on one channel.
RING_LL128_2, ONE_CHANNEL = 2 | 2 << 4 | 2 << 6, 1 << 6
RING_1 = 2 | 2 << 4 | 1 << 6


def summary(lines: list[str]) -> tuple[dict[str, int], int, dict[str, int]]:
    """Counts of the driver's threads, NCCL's activation mask, counts of the chained plugin."""
    counts, mask, *theirs = lines
    return json.loads(counts), int(mask.removeprefix("mask ")), json.loads(theirs[0]) if theirs else {}


@pytest.mark.parametrize("each", [500, pytest.param(11_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("version", VERSIONS)
def test_threads(built: Built, version: str, each: int) -> None:
    """Of operations of 64 threads, with ends in any order and twice, and communicators made and destroyed, each is reported once, or counted as lost.

    An operation has 15 calls on average: these are half a million calls, or ten million.
    """
    counts, mask, _ = summary(built.play("64", str(each), version=version))
    assert mask == 2 | 4 | 64  # operations, messages, and kernels of channels
    made = counts["free"] + counts["in_call"] + counts["untimed_in_call"]
    assert made + counts["not_recorded"] == 64 * each
    assert counts["written"] == counts["free"]
    assert counts["timed"] == counts["free"] - counts["messages"]
    if version == OLDEST:
        assert counts["free"] == counts["lost"] == 0
        assert 0.4 < counts["in_call"] / 64 / each / 0.75 < 0.6  # half of the collectives
    else:
        assert counts["lost"] == counts["not_recorded"] < 64 * 20
    # A thread that is interrupted for thousands of calls does not find its times any more.
    assert counts["in_call"] - 64 * 20 < counts["over"] <= counts["in_call"]


@pytest.mark.parametrize("chained", [4, 5, 6])
def test_chain(built: Built, chained: int) -> None:
    """A chained plugin of any version gets what NCCL would have given it, with its own handles and parents, and ours misses nothing."""
    counts, mask, theirs = summary(built.play("8", "500", chained=chained))
    assert counts["written"] == counts["free"]
    assert counts["over"] == counts["in_call"] == 8 * 500 - counts["free"] - counts["untimed_in_call"]
    assert mask == 2 | 4 | 8 | 64
    assert (theirs["wrong"], theirs["no_parent"]) == (0, 0)
    assert theirs["inits"] == theirs["finalizes"] == 8
    assert theirs["1"] == theirs["2"] + theirs["4"] == 8 * 500
    assert theirs["512"] == (0 if chained == 4 else 8 * 500)  # API calls are newer than version 4
    assert theirs["64"] == theirs["states"] > 0
    assert theirs["stops"] == sum(theirs[kind] for kind in ("1", "2", "4", "64", "512"))


@pytest.mark.parametrize("chained", [4, 5])
def test_chain_of_the_oldest(built: Built, chained: int) -> None:
    """In version 4, a chained plugin of version 4 gets what NCCL would have given it; one that has only a later version is not used."""
    counts, mask, theirs = summary(built.play("8", "500", version=OLDEST, chained=chained))
    assert (counts["written"], counts["over"]) == (0, counts["in_call"])
    assert mask == 2 | 4 | 64 | (8 if chained == 4 else 0)
    if chained == 4:
        assert (theirs["wrong"], theirs["no_parent"]) == (0, 0)
        assert theirs["1"] == theirs["2"] + theirs["4"] == 8 * 500
        assert theirs["64"] == theirs["states"] > 0
        assert theirs["stops"] == sum(theirs[kind] for kind in ("1", "2", "4", "64"))


def test_chained_mask(built: Built) -> None:
    """A chained plugin may ask for more while the job runs: NCCL's mask follows with the next event."""
    lines = built.play(script="comm 1 42 dp\nask 16\napi 2 1 0\n", chained=6)
    assert lines[0] == "group 42 dp 0/2"
    assert lines[1] == f"mask {2 | 4 | 8 | 16 | 64}"


def test_without_the_probe(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no probe uses it, the plugin asks NCCL for nothing, and passes on what a chained one asks for."""
    monkeypatch.setenv("NO_SINK", "1")
    script = "comm 1 42 dp\napi 2 1 0\ncoll 3 1 2 1\nstop 3\nfinalize 1\n"
    assert built.play(script=script) == ["mask 0"]
    mask, theirs = built.play(script=script, chained=6)
    assert mask == f"mask {2 | 4 | 8 | 64}"
    assert json.loads(theirs)["2"] == 1


def times_of(built: Built, script: str, **how: Any) -> list[str]:
    return [line for line in built.play(script=script, **how) if line.startswith(("times", "op", "group", "lost"))]


#: A collective on channels 0 and 1 within call 5: its times are those of the first begin and the last end, in any order of the ends.
IN_CALL = """comm 1 42 dp
call 5
api 2 1 0
clock
coll 3 1 2 2
stop 2
call 0
channel 4 1 3 0 0
channel 5 1 3 1 200
times 5
ended 5 5000
stop 3
times 5
ended 4 6000
times 5
times 6
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_times_of_a_call(built: Built, version: str) -> None:
    """Times of an operation within a call of c10d are asked for by the call's number, known once all has ended, and not given to the sink."""
    over = f"times over 6000 choice {RING_LL128_2}"
    pending = f"times pending -1 choice {RING_LL128_2}"
    assert times_of(built, IN_CALL, version=version) == [pending, pending, over, "times unknown -1 choice 0"]


def test_ends_of_channels(built: Built) -> None:
    """Of an operation on several channels it is known which ended last, and how long after the first; not of several operations of one call."""
    begins = "clock\ncoll 3 1 2 3\n" + "".join(f"channel {4 + n} 1 3 {n} 0\n" for n in range(3))
    ended = "ended 5 500000\nended 4 200000\nended 6 450000\nstop 3\n"
    operation = f"comm 1 42 dp\napi 2 1 0\n{begins}{ended}"
    assert [line for line in built.play(script=operation) if line.startswith("channel")] == ["channel 1 last, 300 us"]
    in_call = f"comm 1 42 dp\ncall 9\napi 2 1 0\n{begins}{{more}}call 0\n{ended}{{ends}}times 9\n"
    of_one = built.play(script=in_call.format(more="", ends=""))
    assert [line for line in of_one if line.startswith("channel")] == ["channel 1 last, 300 us"]
    more, ends = "coll 7 1 2 2\nchannel 8 1 7 0 0\nchannel 9 1 7 1 0\n", "ended 8 100\nended 9 300000\nstop 7\n"
    of_two = built.play(script=in_call.format(more=more, ends=ends))
    assert [line for line in of_two if line.startswith("channel")] == []
    assert of_two[0].startswith("times over 500000 ")
    one_channel = "comm 1 42 dp\napi 2 1 0\nclock\ncoll 3 1 2 1\nchannel 4 1 3 5 0\nended 4 9000\nstop 3\n"
    assert not [line for line in built.play(script=one_channel) if line.startswith("channel")]


def test_several_operations_of_a_call(built: Built) -> None:
    """A call that makes several operations lasts from the first begin to the last end; its choice is known only if they agree."""
    script = "comm 1 42 dp\ncall 7\napi 2 1 0\nclock\ncoll 3 1 2 1\ncall 0\ncoll 4 1 2 1\nstop 3\nstop 4\nchannel 5 1 3 0 100\nended 5 200\n"
    script += "channel 6 1 4 0 300\nended 6 900\ntimes 7\n"
    assert times_of(built, script) == [f"times over 800 choice {RING_1}"]
    assert times_of(built, script.replace("coll 4 1 2 1", "p2p 4 1 2 1")) == ["times unknown -1 choice 0"], "a message"


def test_without_a_call(built: Built) -> None:
    """An operation that c10d has not made goes to the sink, its communicator is announced before it, and only once."""
    operation = "api 2 1 0\nclock\ncoll 3 1 2 1\nstop 2\nchannel 4 1 3 9 10000\nended 4 12000\nstop 3\n"
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns 2000"
    assert times_of(built, "comm 1 42 dp\n" + operation * 2) == ["group 42 dp 0/2", op, op]


@pytest.mark.parametrize("version", VERSIONS)
def test_messages(built: Built, version: str) -> None:
    """A message has no times: the thread of its kernel that notes them may be through while others wait for the peer."""
    message = "api 2 1 0\nclock\np2p 3 1 2 1\nstop 2\nchannel 4 1 3 9 10000\nended 4 12000\nstop 3\n"
    op = f"op Send 100 ncclInt8 peer 3 choice {ONE_CHANNEL} ns -1"
    without_call = [] if version == OLDEST else ["group 42 dp 0/2", op, op]
    assert times_of(built, "comm 1 42 dp\n" + message * 2, version=version) == without_call
    in_call = f"comm 1 42 dp\ncall 5\n{message}call 0\ntimes 5\n"
    assert times_of(built, in_call, version=version) == ["times unknown -1 choice 0"]


@pytest.mark.parametrize("has_called", [True, False])
def test_without_a_call_in_the_oldest(built: Built, has_called: bool) -> None:
    """Version 4 does not report whether an operation without a call is a replay, whose times NCCL may mix up: it is not recorded.

    From then on no times of its communicator are used, unless the thread makes calls of c10d: CUDA's threads, which replay, make none.
    """
    made = "coll 3 1 2 1\nchannel 4 1 3 0 0\nended 4 700\nstop 3\n"
    script = (
        "comm 1 42 dp\nclock\n" + ("call 8\ncall 0\n" if has_called else "") + made + f"call 9\n{made}call 0\ntimes 9\n"
    )
    over = f"times over 700 choice {RING_1}"
    assert times_of(built, script, version=OLDEST) == [over if has_called else "times unknown -1 choice 0"]


def test_one_call_of_the_oldest(built: Built) -> None:
    """In version 4, a kernel that runs several operations of one call is not marked as shared."""
    both = "group 9 1\nclock\nin_group 4 1 2 1 9\nin_group 5 1 2 1 9\nstop 4\nstop 5\n"
    script = (
        f"comm 1 42 dp\ncall 1\n{both}call 0\nchannel 6 1 4 0 0\nchannel 7 1 5 1 0\nended 6 50\nended 7 60\ntimes 1\n"
    )
    assert times_of(built, script, version=OLDEST) == [f"times over 60 choice {RING_1}"]


def test_ignored_communicator(built: Built) -> None:
    """A communicator that the sink refuses is asked for once, and its operations are not recorded."""
    script = "comm 1 13 x\napi 2 1 0\ncoll 3 1 2 1\nstop 3\n" * 2
    assert times_of(built, script) == ["group 13 x 0/2"] * 2


def test_replays(built: Built) -> None:
    """An operation captured outside of c10d is reported at each replay, without another API call; one captured within c10d has times by replay."""
    replay = "coll 3 1 2 1\nclock\nchannel 4 1 3 0 0\nended 4 700\nstop 3\n"
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns 700"
    assert times_of(built, "comm 1 42 dp\napi 2 1 1\nstop 2\n" + replay * 3) == ["group 42 dp 0/2", op, op, op]
    script = "comm 1 42 dp\ncall 9\napi 2 1 1\nstop 2\ncall 0\n" + replay + replay.replace("700", "800")
    assert times_of(built, script + "times 9\ntimes 9 1\ntimes 9 2\ntimes 9 3\n") == [
        "times unknown -1 choice 0",
        f"times over 700 choice {RING_1}",
        f"times over 800 choice {RING_1}",
        "times unknown -1 choice 0",
    ]


def test_operations_beside_graphs(built: Built) -> None:
    """NCCL does not count replays that follow an operation outside of graphs, so no times are used from then on."""
    replay = "coll 3 1 2 1\nclock\nchannel 4 1 3 0 0\nended 4 700\nstop 3\n"
    eager = replay.replace("coll 3 1 2", "api 5 1 0\ncoll 3 1 5")
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns"
    script = f"comm 1 42 dp\napi 2 1 1\nstop 2\n{replay}{eager}{replay}{eager}"
    assert times_of(built, script) == ["group 42 dp 0/2", f"{op} 700", f"{op} 700", f"{op} -1", f"{op} -1"]


@pytest.mark.parametrize("others", [50, 64])
def test_late_reports(built: Built, others: int) -> None:
    """If so many operations have begun before an operation's end is reported that NCCL may have read a later one's, its times are marked or dropped."""
    begin, end = "clock\ncoll 3 1 2 1\nchannel 4 1 3 0 0\n", "coll 6 1 5 1\n" * others + "ended 4 700\nstop 3\n"
    late = others >= 60
    in_call = f"comm 1 42 dp\napi 5 1 0\ncall 9\napi 2 1 0\n{begin}call 0\n{end}times 9\n"
    assert times_of(built, in_call)[1] == f"times over 700 choice {RING_1 | (1 << 14 if late else 0)}"
    free = f"comm 1 42 dp\napi 5 1 0\napi 2 1 0\n{begin}{end}"
    assert times_of(built, free)[1] == f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns {-1 if late else 700}"
    replayed = f"comm 1 42 dp\napi 5 1 1\ncall 9\napi 2 1 1\ncall 0\n{begin}{end}times 9 1\n"
    assert times_of(built, replayed)[1] == ("times unknown -1 choice 0" if late else f"times over 700 choice {RING_1}")


def test_message_to_itself(built: Built) -> None:
    """After a message to the own rank, which NCCL does not count and its kernels do, no times of this communicator are used."""
    script = "comm 1 42 dp\ncall 4\napi 2 1 0\nself 3 1 2 2\nstop 3\nclock\np2p 4 1 2 1\nstop 4\nchannel 5 1 4 0 0\nended 5 50\ntimes 4\n"
    assert times_of(built, script) == ["times unknown -1 choice 0"]


def test_kernel_before_its_launch(built: Built) -> None:
    """Times before the launch belong to other operations: this communicator's times are not used any more."""
    script = "comm 1 42 dp\nclock\napi 2 1 0\ncoll 3 1 2 1\nstop 3\nchannel 4 1 3 0 -9000000\nended 4 -8000000\n"
    script += "api 2 1 0\ncoll 3 1 2 1\nstop 3\nclock\nchannel 4 1 3 0 0\nended 4 700\n"
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns -1"
    # The clocks' distance is known from the second operation on.
    first = "api 2 1 0\nclock\ncoll 3 1 2 1\nstop 3\nchannel 4 1 3 0 0\nended 4 700\n"
    lines = times_of(built, script.replace("clock\n", first, 1))
    assert lines == ["group 42 dp 0/2", op.replace("-1", "700"), op, op]


@pytest.mark.parametrize(
    ("nccl", "setting", "ns"), [(23007, "", -1), (23007, "0", 700), (22900, "1", -1), (22809, "", 700), (0, "", -1)]
)
def test_broadcasts(built: Built, monkeypatch: pytest.MonkeyPatch, nccl: int, setting: str, ns: int) -> None:
    """After a broadcast on a communicator, its times are not used with an NCCL that then reports those of other operations."""
    monkeypatch.setenv("NCCL_ALLGATHERV_ENABLE", setting) if setting else monkeypatch.delenv(
        "NCCL_ALLGATHERV_ENABLE", raising=False
    )
    after = "api 2 1 0\nclock\ncoll 3 1 2 1\nstop 3\nchannel 4 1 3 0 0\nended 4 700\n"
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns"
    lines = times_of(built, f"version {nccl}\ncomm 1 42 dp\n{after}broadcast 1\n{after}")
    assert lines == ["group 42 dp 0/2", f"{op} 700", f"{op} {ns}"]


@pytest.mark.parametrize("nccl", [23003, 23102])
def test_faulty_versions(built: Built, nccl: int) -> None:
    """A version of NCCL that crashes or slows down with such a plugin is asked for nothing."""
    assert built.play(script=f"version {nccl}\ncomm 1 42 dp\napi 2 1 0\ncoll 3 1 2 1\nstop 3\n") == ["mask 0"]


def test_one_kernel(built: Built) -> None:
    """Operations of several calls in one group run in one kernel, and are marked so; those of one call are not."""
    of_two = "call 1\napi 2 1 0\ncall 2\napi 3 1 0\ncall 0\ngroup 9 1\nclock\nin_group 4 1 2 1 9\nin_group 5 1 3 1 9\nstop 4\nstop 5\n"
    ends = "channel 6 1 4 0 0\nchannel 7 1 5 1 0\nended 6 50\nended 7 50\ntimes 1\ntimes 2\n"
    shared = f"times over 50 choice {RING_1 | 1 << 13}"
    assert times_of(built, "comm 1 42 dp\n" + of_two + ends) == [shared, shared]
    of_one = of_two.replace("call 2\n", "")
    assert times_of(built, "comm 1 42 dp\n" + of_one + ends.replace("times 2\n", "")) == [
        f"times over 50 choice {RING_1}"
    ]


def test_parts_of_messages(built: Built) -> None:
    """A message of which the last channels have no part is not timed, nor is what follows: its kernels count more than NCCL does."""
    script = "comm 1 42 dp\ncall 4\napi 2 1 0\ntiny 3 1 2\nstop 3\ntimes 4\n"  # 100 bytes on two channels
    assert times_of(built, script) == ["times unknown -1 choice 0"]


def test_another_process(built: Built) -> None:
    """A proxy's operation of a rank in another process, whose context and parent are addresses there, is not touched."""
    script = "comm 1 42 dp\napi 2 1 0\ncoll 3 1 2 1\nproxy 1 3 0\nproxy 1 3 1\n"
    lines = [line for line in built.play(script=script, chained=6) if line.startswith("proxy")]
    assert lines == ["proxy has a handle", "proxy has none"]


def test_destroyed_communicator(built: Built) -> None:
    """An operation that has not ended when its communicator is destroyed is recorded without times; later ends of it find nothing."""
    script = (
        "comm 1 42 dp\napi 2 1 0\ncoll 3 1 2 1\nstop 3\nclock\nchannel 4 1 3 0 0\nfinalize 1\nended 4 100\nstop 3\n"
    )
    op = f"op AllReduce 8 ncclFloat32 peer 0 choice {RING_1} ns -1"
    assert times_of(built, script) == ["group 42 dp 0/2", op]


def test_too_many_under_way(built: Built) -> None:
    """More operations than there are places are counted as lost, and do not disturb the others."""
    script = "comm 1 42 dp\napi 2 1 0\n" + "coll 3 1 2 1\n" * 8200 + "lost\n"
    assert times_of(built, script) == ["group 42 dp 0/2", "lost 8"]
