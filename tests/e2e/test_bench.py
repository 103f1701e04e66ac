"""``commwatch bench`` with real jobs: what it prints and keeps, what it refuses, and a link of known rate."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch_agent.reference.references import load
from tests import prefork
from tests.agent.test_config import one_line
from tests.e2e.hosts import Host
from tests.helpers import clean_env, commwatch, free_port

NCCL_TESTS = Path(__file__).parents[1] / "fixtures" / "nccl_tests"
QUICK = ("--min-bytes", "4K", "--max-bytes", "1M", "--factor", "16", "--seconds", "0.3")


def launch() -> list[str]:
    """A launch command as a user gives it."""
    flags = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    return ["--", sys.executable, "-m", "torch.distributed.run", *flags]


def kept(state: Path) -> list[Path]:
    """The references in a state directory, hidden files included."""
    return sorted((state / "references").iterdir()) if (state / "references").exists() else []


# -- a sweep ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["forks", pytest.param("torchrun", marks=pytest.mark.long)])
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a sweep on two ranks printed, and its state directory."""
    state = tmp_path_factory.mktemp("sweep")
    # A probe that is on in the environment stays off in the sweep.
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(state / "run"))
    launched = launch() if request.param == "torchrun" else ["--", *prefork.launcher(2)]
    done = commwatch("bench", "--state", state, *QUICK, *launched, env=env)
    assert done.returncode == 0, done.stderr
    assert not list(state.glob("run/**/*.ring"))
    return done.stdout, state


def test_table_and_reference_agree(swept: tuple[str, Path]) -> None:
    """Every default operation has a line for each size; its bandwidths are those of its time by hand, and the kept ones the same."""
    printed, state = swept
    (path,) = kept(state)
    reference = load(path)
    assert (reference.kind, reference.backend, reference.group_size) == ("bench", "gloo", 2)
    assert reference.hosts == (socket.gethostname(),)
    assert set(reference.points) == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"}
    assert f"# kept as {path}" in printed
    op, lines = "", 0
    for line in printed.splitlines():
        cells = line.split()
        if re.fullmatch(r"# [a-z_]+", line):
            op = cells[1]
        elif not line.startswith("#"):
            size, count, kind, redop, root = cells[:5]
            time_us, algbw, busbw = map(float, cells[5:])
            assert reference.points[op][int(size)] * 1e6 == pytest.approx(time_us, abs=0.006)
            assert (int(count), kind) == (int(size) // 4 // (1 if op in ("all_reduce", "broadcast") else 2), "float")
            assert redop == ("sum" if op in ("all_reduce", "reduce_scatter") else "none")
            assert root == ("0" if op == "broadcast" else "-1")
            assert algbw == pytest.approx(int(size) / time_us / 1e3, rel=0.01, abs=6e-5)
            assert busbw == pytest.approx(algbw * {"all_reduce": 1, "broadcast": 1}.get(op, 0.5), rel=0.02, abs=2e-4)
            lines += 1
    assert lines == 15
    assert [set(points) for points in reference.points.values()] == [{4096, 65536, 1048576}] * 5


def test_list(swept: tuple[str, Path]) -> None:
    """--list prints what is kept, for people and for programs; with nothing kept it prints that."""
    _, state = swept
    (path,) = kept(state)
    listed = commwatch("bench", "--list", "--state", state)
    assert listed.returncode == 0
    assert "bench  gloo, 2 ranks on" in listed.stdout
    assert str(path) in listed.stdout
    (one,) = json.loads(commwatch("bench", "--list", "--json", "--state", state).stdout)["references"]
    assert one["file"] == str(path)
    assert "no references" in commwatch("bench", "--list", "--state", state / "none").stdout


def test_json_of_two_backends(tmp_path: Path) -> None:
    """What a backend cannot do here is reported and left out, the others are measured; --json gives points in seconds and curves."""
    ops = "all_reduce,reduce,gather,scatter"
    flags = ("--backends", "nccl,gloo", "--ops", ops, "--json", "--state", tmp_path)
    done = commwatch("bench", *QUICK, *flags, "--", *prefork.launcher(2))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (one,) = found["references"]
    assert one["backend"] == "gloo"
    assert list(one["points"]) == ops.split(",")
    for op, fitted in one["fits"].items():
        assert fitted["alpha_s"] > 0 or fitted["bandwidth"] > 0, op
    assert len(found["left_out"]) == 1
    assert found["left_out"][0].startswith("nccl left out: ")
    assert load(Path(one["file"])).points["gather"].keys() == {4096, 65536, 1048576}


def test_other_launchers(tmp_path: Path) -> None:
    """A launcher that says ranks in its own variables will do: here one that sets those of Open MPI, as mpirun does."""
    script = tmp_path / "mpirun"
    script.write_text(
        "#!/bin/sh\nfor rank in 0 1; do\n"
        "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
        '"$@" &\ndone\nwait\n'
    )
    script.chmod(0o700)
    done = commwatch("bench", "--ops", "all_reduce", "--state", tmp_path, *QUICK, "--", script, *prefork.launcher(0))
    assert done.returncode == 0, done.stderr
    assert load(kept(tmp_path)[0]).group_size == 2


def test_rows_are_printed_as_measured(tmp_path: Path) -> None:
    """A row is printed before the next point is measured: here the launch command waits until the row has been read."""
    script, read = tmp_path / "launch", tmp_path / "read"
    lines = [
        {"ranks": 2, "hosts": ["node1"], "torch": "2"},
        {"backend": "gloo", "op": "all_reduce", "size": 1024, "time_s": 1e-4, "timed": 5},
    ]
    written = "".join(f"echo {shlex.quote(json.dumps(line))} >> $out; " for line in lines)
    waits = f"until [ -e {read} ]; do sleep 0.05; done; echo {shlex.quote(json.dumps({'done': True}))} >> $out"
    script.write_text(f"#!/bin/sh\nout=${{2#--results=}}; {written}{waits}\n")
    script.chmod(0o700)
    command = [sys.executable, "-m", "commwatch", "bench", "--state", str(tmp_path), "--", str(script)]
    with subprocess.Popen(command, env=clean_env(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        row = next(line for line in process.stdout if not line.startswith("#"))
        assert row.split()[:2] == ["1024", "256"]
        read.touch()
        rest = process.stdout.read()
    assert process.returncode == 0
    assert "# kept as" in rest
    assert "1024 " not in rest


# -- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "commwatch bench -- torchrun"),
        (("--list", "--", "torchrun"), "one of"),
        (("--ops", "all_reduce,barrier", "--", "torchrun"), "'barrier'; choose from all_reduce"),
        (("--ops", "", "--", "torchrun"), "--ops"),
        (("--backends", "gloo;nccl", "--", "torchrun"), "gloo;nccl"),
        (("--min-bytes", "1T", "--", "torchrun"), "--min-bytes 1T"),
        (("--min-bytes", "2M", "--max-bytes", "1M", "--", "torchrun"), "--max-bytes 1M"),
        (("--factor", "1", "--", "torchrun"), "--factor 1"),
        (("--factor", "nan", "--", "torchrun"), "--factor nan"),
        (("--seconds", "0", "--", "torchrun"), "--seconds 0"),
        (("--", "no-such-command"), "no-such-command"),
        (("--import", "no-such-file"), "no-such-file"),
        (("--import", "f", "--ops", "all_gather,all_reduce"), "a single operation in --ops"),
    ],
)
def test_asked_wrongly(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    """A wrong flag is named in one line, before anything is started."""
    assert named in one_line(commwatch("bench", "--state", tmp_path, *arguments))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "ranks", "named"),
    [
        (("--backends", "glue"), 2, "glue: torch has no such backend; it has"),
        ((), 1, "one rank cannot communicate"),
        ((), 0, "RANK and WORLD_SIZE"),
    ],
)
def test_cannot_be_swept(flags: tuple[str, ...], ranks: int, named: str, tmp_path: Path) -> None:
    """An unknown backend, too few ranks, or ranks without a number, are reported in one line, without torch's traceback; nothing is kept."""
    done = commwatch("bench", *QUICK, *flags, "--state", tmp_path, "--", *prefork.launcher(ranks))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert named in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "code", "named"),
    [
        (("sh", "-c", "echo said; exit 7"), 7, "failed with exit code 7"),
        (("sh", "-c", "kill -9 $$"), 137, "failed with exit code 137"),
        (("true",), 1, "must start Python"),
    ],
)
def test_command_that_fails(command: tuple[str, ...], code: int, named: str, tmp_path: Path) -> None:
    """A launch command that fails gives its exit code and one line of ours; what it printed goes to standard error."""
    done = commwatch("bench", "--state", tmp_path, "--", *command)
    assert (done.returncode, done.stdout) == (code, "")
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert ("said" in done.stderr.splitlines()) == ("echo said; exit 7" in command)
    assert kept(tmp_path) == []


def test_import(tmp_path: Path) -> None:
    """--import keeps the measurements of nccl-tests, one reference for each set of ranks, and prints what it left out."""
    done = commwatch("bench", "--import", NCCL_TESTS / "mixed-2.19.6.txt", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    reference = load(kept(tmp_path)[0])
    assert (reference.kind, reference.backend, reference.group_size) == ("nccl_tests", "nccl", 8)
    assert reference.hosts == ("node0", "node1")
    assert set(reference.points) == {"all_reduce", "all_gather", "all_to_all", "send", "recv"}
    assert "left out: torn" in done.stdout
    nothing = commwatch("bench", "--import", NCCL_TESTS / "README.md", "--state", tmp_path)
    assert "no output of nccl-tests" in one_line(nothing, 1)
    old = commwatch(
        "bench", "--import", NCCL_TESTS / "old-2.0.txt", "--ops", "all_gather", "--state", tmp_path, "--json"
    )
    (one,) = json.loads(old.stdout)["references"]
    assert set(one["points"]) == {"all_reduce", "broadcast", "reduce_scatter", "all_gather"}


# -- a link of known rate -------------------------------------------------------------------------

#: TCP/IP over Ethernet leaves about 95% of 200 Mbit/s.
RATE = 200e6 / 8 * 0.95


@pytest.mark.by_the_clock
def test_known_link(hosts: list[Host], tmp_path: Path) -> None:
    """The curve through a sweep between two hosts has the bandwidth of the link within 15%."""
    script = tmp_path / "launch"
    command = [f"#!/bin/sh\nexport MASTER_ADDR={hosts[0].address} MASTER_PORT=29711 WORLD_SIZE=2"]
    for rank, host in enumerate(hosts):
        host.shape("200mbit")
        command.append(f'RANK={rank} GLOO_SOCKET_IFNAME={host.device} {shlex.join(host.there)} "$@" &')
    script.write_text("\n".join([*command, "wait", ""]))
    script.chmod(0o700)
    # A link held to a rate lets the first 32 KiB through at once, so the sizes are well above that.
    sizes = ("--min-bytes", "256K", "--max-bytes", "4M", "--factor", "4", "--seconds", "6")
    done = commwatch(
        "bench", "--ops", "all_reduce", *sizes, "--json", "--state", tmp_path, "--", script, sys.executable
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["references"]
    assert found["fits"]["all_reduce"]["bandwidth"] == pytest.approx(RATE, rel=0.15)
