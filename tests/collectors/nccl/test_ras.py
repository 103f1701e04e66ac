"""NCCL's RAS: the client against a server that answers well or badly, and the answers of three versions.

The fixtures are made by hand in the form of NVIDIA/nccl: docs/userguide/source/troubleshooting/ras.rst (JSON and text), and
src/ras/client_support.cc of NCCL 2.24.3 and 2.30.7.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl import ras
from commwatch_collectors.nccl.ras import Communicator, Member, RasError, Status, ask, parse
from tests.helpers import examples, free_port
from tests.ras_server import listening, ras_server, serving

FIXTURES = Path(__file__).parents[2] / "fixtures/ras"
TEXTS = [path.read_text() for path in sorted(FIXTURES.iterdir())]


def answer(name: str) -> Status:
    """What a fixture says."""
    return parse((FIXTURES / name).read_text())


# -- the client


def test_ask_json() -> None:
    """It shakes hands, asks for JSON and for the status, and takes all that comes until the server closes."""
    status = (FIXTURES / "healthy.json").read_bytes()
    with ras_server(status) as server:
        assert ask("127.0.0.1", server.port).encode() == status
    assert server.asked == ["CLIENT PROTOCOL 2", "SET FORMAT json", "VERBOSE STATUS"]


def test_ask_before_json() -> None:
    """A RAS without JSON answers in text."""
    status = (FIXTURES / "nccl-2.24.txt").read_bytes()
    with ras_server(status, knows_json=False) as server:
        assert parse(ask("127.0.0.1", server.port)).form == "text"


def test_nobody_there() -> None:
    """If no process listens, an OSError is raised."""
    with pytest.raises(OSError, match="refused"):
        ask("127.0.0.1", free_port())


@pytest.mark.parametrize("hello", [b"", b"SSH-2.0-x\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 100_000, b"\xff\n"])
def test_somebody_else(hello: bytes) -> None:
    """Another server is not taken for RAS, and is sent nothing more."""

    def serve(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(hello)

    with listening() as listener, serving(listener, serve), pytest.raises((RasError, ConnectionError)):
        ask("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("until", [0, 1, 2])
def test_silent_server(until: int) -> None:
    """A server that falls silent at any point is given up in time."""
    answers = [b"SERVER PROTOCOL 2\n", b"OK\n", b'{"nccl_version": '][:until]

    def serve(connection: socket.socket) -> None:
        for each in answers:
            connection.recv(100)
            connection.sendall(each)
        while connection.recv(100):
            pass

    with listening() as listener, serving(listener, serve), pytest.raises(TimeoutError):
        ask("127.0.0.1", listener.getsockname()[1], most_s=0.3)


def test_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without end is cut off."""
    monkeypatch.setattr("commwatch_collectors.nccl.ras.MOST_BYTES", 100_000)

    def serve(connection: socket.socket) -> None:
        for each in (b"SERVER PROTOCOL 2\n", b"OK\n"):
            connection.recv(100)
            connection.sendall(each)
        while True:
            connection.sendall(b"x" * 10_000)

    with listening() as listener, serving(listener, serve), pytest.raises(RasError, match="longer"):
        ask("127.0.0.1", listener.getsockname()[1])


# -- JSON


def test_healthy() -> None:
    """Each rank of each communicator with its process, its state and what it has launched by operation."""
    status = answer("healthy.json")
    assert (status.nccl_version, status.form, status.dead) == ("2.29.1", "json", ())
    first, second = status.communicators
    assert first.comm == "0xae94423cfbb2ef4a 0xb7e7187447156001:0xb8242ed28a71381e"
    assert (first.size, second.size, len(second.members)) == (2, 8, 8)
    counts = {"broadcast": 7, "reduce": 0, "all_gather": 0, "reduce_scatter": 0, "all_reduce": 42}
    assert first.members == (Member(0, 104, "running", counts), Member(1, 106, "running", counts))


def test_missing_ranks() -> None:
    """Ranks that RAS cannot reach are silent, or dead once it has given them up; ones that answer but are no members are absent."""
    assert answer("silent.json").communicators[0].members[1] == Member(1, 106, "silent", None)
    assert answer("dead.json").communicators[0].members[1] == Member(1, 106, "dead", None)
    assert answer("dead.json").dead == (106,)
    said = json.loads((FIXTURES / "silent.json").read_text())
    said["communicators"][0]["missing_ranks"][0]["status"]["unresponsive"] = False
    assert parse(json.dumps(said)).communicators[0].members[1].state == "absent"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"init_state": 7}, "init"),
        ({"init_state": 3}, "error"),
        ({"async_error": 6}, "error"),
        ({"finalize_called": True}, "ending"),
        ({"destroy_flag": True}, "ending"),
        ({"abort_flag": True, "async_error": 6}, "ending"),
        ({"async_error": 7}, "running"),
    ],
)
def test_states(status: dict[str, Any], state: str) -> None:
    """States are summed up as RAS does it itself in text."""
    said = json.loads((FIXTURES / "healthy.json").read_text())
    said["communicators"][0]["ranks"][0]["status"].update(status)
    assert parse(json.dumps(said)).communicators[0].members[0].state == state


# -- text


def test_text_by_operation() -> None:
    """From NCCL 2.26 on the text names the operations that differ; the ranks that are not named are all the others."""
    status = answer("nccl-2.27.txt")
    assert (status.nccl_version, status.form, status.dead) == ("2.27.5", "text", (3_487_984,))
    (comm,) = status.communicators
    assert (comm.comm, comm.size, len(comm.members)) == ("27a079b828ff1a75", 32, 32)
    members = {member.rank: member for member in comm.members}
    assert members[21] == Member(21, 3_487_984, "dead", None)
    assert members[0] == Member(0, 483_072, "running", {"all_reduce": 6649, "broadcast": 4})
    assert members[3] == Member(3, 483_075, "running", {"all_reduce": 6648, "broadcast": 0})
    assert members[31] == Member(31, None, "running", {"all_reduce": 6650, "broadcast": 4})


def test_text_of_all_operations() -> None:
    """Before that the text has one number, and missing ranks without their processes."""
    status = answer("nccl-2.24.txt")
    first, second = sorted(status.communicators, key=lambda comm: -(comm.size or 0))
    assert (second.comm, second.members) == ("cf264af53edbe986", (Member(2, None, "silent", None),))
    assert [(m.rank, m.pid, m.counts) for m in first.members] == [
        (0, None, {"collective": 6650}),
        (1, 106, {"collective": 6649}),
        (2, None, {"collective": 6650}),
        (3, None, {"collective": 6650}),
    ]


def test_text_of_a_tie() -> None:
    """Where half the ranks differ from the other half and none is named, no rank's count is guessed."""
    text = (FIXTURES / "nccl-2.24.txt").read_text()
    lots = "  2 ranks have launched up to operation 6650\n  2 ranks have launched up to operation 6649\n"
    at = text.index("  3 ranks")
    status = parse(text[:at] + lots)
    assert Communicator("27a079b828ff1a75", 4, ()) in status.communicators


def test_text_of_a_healthy_job() -> None:
    """The text has nothing about communicators without a fault."""
    text = (FIXTURES / "nccl-2.24.txt").read_text()
    assert parse(text[: text.index("INCOMPLETE\n  Missing")]).communicators == ()


STATUSES = """  Communicator ranks have different status
  26 ranks have status RUNNING
  2 ranks have status FINALIZE
  Rank 4 -- GPU 4 managed by process 507289 on node 172.16.64.210
  Rank 20 -- GPU 4 managed by process 3500075 on node 172.16.64.213
  2 ranks have status NOCOMM
  Rank 8 -- GPU 0 managed by process 1598388 on node 172.16.64.212
  Rank 9 -- [process information not found]
  Rank 3 has status INIT -- GPU 3 managed by process 483075 on node 172.16.64.210
"""
COUNTS = "  Communicator ranks have different AllReduce operation counts\n"


def test_text_of_states() -> None:
    """From NCCL 2.28 on the text names the ranks that begin or end: they are in that state, the others run."""
    text = (FIXTURES / "nccl-2.27.txt").read_text()
    (comm,) = parse(text.replace(COUNTS, f"{STATUSES}\n{COUNTS}")).communicators
    members = {member.rank: member for member in comm.members}
    assert {rank: member.state for rank, member in members.items() if member.state != "running"} == {
        3: "init",
        4: "ending",
        8: "absent",
        9: "absent",
        20: "ending",
        21: "dead",
    }
    assert members[3] == Member(3, 483_075, "init", {"all_reduce": 6648, "broadcast": 0})
    assert members[8] == Member(8, 1_598_388, "absent", {"all_reduce": 6650, "broadcast": 4})


def test_text_of_states_without_names() -> None:
    """Where ranks without names have several states, no rank's is guessed; where all have one, it is in the table."""
    text = (FIXTURES / "nccl-2.27.txt").read_text()
    lots = STATUSES[: STATUSES.index("  Rank 4")]
    (comm,) = parse(text.replace(COUNTS, f"{lots}{COUNTS}")).communicators
    assert comm.members == (Member(21, 3_487_984, "dead", None),)
    table = "31   RUNNING  INCOMPLETE"
    assert table in text
    (comm,) = parse(text.replace(table, table.replace(" RUNNING", "FINALIZE"))).communicators
    assert {member.state for member in comm.members} == {"ending", "dead"}


# -- anything


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"communicators": 5}', "hello", "[" * 100_000, '{"a":' * 100_000]
)
def test_no_answer(text: str) -> None:
    """What is no status is refused."""
    with pytest.raises(RasError):
        parse(text)


@given(st.sampled_from(TEXTS), st.integers(0, 9000), st.integers(0, 9000), st.text(max_size=20))
@examples(300)
def test_any_answer(text: str, cut: int, until: int, more: str) -> None:
    """Answers that are cut, glued or altered are read as far as they make sense, or refused."""
    for torn in (text[:cut], text[:cut] + more + text[until:], text[cut:] + text):
        try:
            status = parse(torn)
        except RasError:
            continue
        for comm in status.communicators:
            assert all(member.state in ("running", "silent", "dead", *_OTHERS) for member in comm.members)


_OTHERS = (ras.INIT, ras.ENDING, ras.ERROR, ras.ABSENT)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["healthy.json", "dead.json"]), st.data())
@examples(300)
def test_any_value(name: str, data: st.DataObject) -> None:
    """Any value in any place of the JSON is skipped or refused, and never raises."""
    said = json.loads((FIXTURES / name).read_text())
    target: Any = said
    while True:
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        inner = target[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        target = inner
    target[key] = data.draw(values)
    with contextlib.suppress(RasError):
        assert parse(json.dumps(said)).form == "json"
