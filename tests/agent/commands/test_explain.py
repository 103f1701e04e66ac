"""``commwatch explain``: what a person or a program gets for NCCL's debug output."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.commands.explain import text
from commwatch_agent.commands.log_files import read
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.facts import Via
from tests.helpers import PATIENCE_S, clean_env, commwatch


def init(rank: int, ranks: int = 2, host: str = "node1", phase: str = "START") -> str:
    """A rank's init of a communicator that is split over hosts of its name."""
    who = f"{host}:{100 + rank}:{200 + rank} [{rank}] NCCL INFO"
    about = f"comm 0x55{rank:02x} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} busId 1000 commId 0xabc"
    return f"{who} ncclCommInitRank {about} - Init {phase}"


def said(rank: int, text: str, host: str = "node1") -> str:
    """A message in the thread that makes the communicator."""
    return f"{host}:{100 + rank}:{200 + rank} [{rank}] NCCL INFO {text}"


HEALTHY = [
    said(0, "NCCL version 2.27.3+cuda12.9"),
    *(
        line
        for rank, host in ((0, "node1"), (1, "node2"))
        for line in (
            said(rank, "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", host),
            said(rank, "Using network IB", host),
            said(rank, "NCCL_IB_HCA set by environment to mlx5_0", host),
            init(rank, host=host),
            said(
                rank,
                "2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer",
                host,
            ),
            said(rank, f"Channel 00/0 : {1 - rank}[0] -> {rank}[0] [receive] via NET/IB/0/GDRDMA", host),
            said(rank, f"Channel 00/0 : {rank}[0] -> {1 - rank}[0] [send] via NET/IB/0/GDRDMA", host),
            init(rank, host=host, phase="COMPLETE"),
        )
    ),
    said(0, "Channel 00/02 : 0 1"),
    said(0, "AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..1}"),
]
BROKEN = [*HEALTHY, "", "node2:101:301 [1] x.cc:7 NCCL WARN Cuda failure 'an illegal memory access was encountered'"]


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    """A log without errors."""
    path = tmp_path / "healthy.log"
    path.write_text("\n".join([*HEALTHY, ""]))
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A log with an error."""
    path = tmp_path / "broken.log"
    path.write_text("\n".join([*BROKEN, ""]))
    return path


def test_healthy(healthy: Path) -> None:
    """A healthy log: what runs where and how, no findings, exit code 0."""
    done = commwatch("explain", healthy)
    assert (done.returncode, done.stderr) == (0, "")
    for expected in ("NCCL 2.27.3, CUDA 12.9", "node1", "mlx5_0:1/IB", "GPUDirect RDMA on all connections", "NCCL_IB_HCA=mlx5_0",
                     "0xabc (2 ranks)", "2 nodes", "2 channels", "NET/IB 2", "AllReduce 1 MiB: RING/LL128", "No findings in 19 lines of NCCL."):  # fmt: skip
        assert expected in done.stdout
    assert len(done.stdout.splitlines()) <= 40


def test_broken(broken: Path) -> None:
    """An error in the log: what, where, what it means and what to do; exit code 1."""
    done = commwatch("explain", broken)
    assert (done.returncode, done.stderr) == (1, "")
    assert "Findings: 1 error" in done.stdout
    assert f"{broken}:{len(BROKEN)}: node2:101:301 [1] x.cc:7 NCCL WARN Cuda failure" in done.stdout
    assert "Xid" in done.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("root:x:0:0:root:/root:/bin/bash", "none: no lines from NCCL, or from PyTorch about NCCL"),
        (
            "[rank0]:[E ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
            "SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds.",
            "none: only PyTorch's lines",
        ),
        ("[rank0]: loss 0.5", "none: no lines from NCCL, or from PyTorch about NCCL"),
        ("srun: error: n1: task 3: Killed", "none: only lines of other programs"),
    ],
)
def test_log_of_something_else(tmp_path: Path, line: str, says: str) -> None:
    """A file without a line of NCCL is reported as such; if PyTorch mentions NCCL in it, that too."""
    path = tmp_path / "some.log"
    path.write_text(f"{line}\n")
    assert f"Library   {says}\n" in commwatch("explain", path).stdout


def test_json(broken: Path) -> None:
    """``--json``: the facts under their keys, communicators, findings with their evidence; the exit code is the same."""
    done = commwatch("explain", "--json", broken)
    assert done.returncode == 1
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["library"], found["nccl_version"], found["n_warn"]) == ("NCCL", ["2.27.3"], 1)
    assert found["comms"] == [
        {"comm_id": "0xabc", "nranks": 2, "ranks_seen": [0, 1], "init_start": 2, "init_complete": 2}
    ]
    assert found["gdrdma"] == {"lines_with": 4, "lines_without": 0}
    assert found["communicators"][0]["transports"] == {"NET/IB": 2}
    assert found["choices"][0]["algo"] == "RING"
    assert found["files"] == [str(broken)]
    (finding,) = found["findings"]
    assert (finding["name"], finding["severity"]) == ("cuda_error", "error")
    assert finding["evidence"] == [{"file": str(broken), "line": len(BROKEN), "text": BROKEN[-1]}]
    assert "torch_watchdog" not in found


def test_many_files(healthy: Path, broken: Path, tmp_path: Path) -> None:
    """Files, globs and packed files are one account; each file counts once."""
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(healthy.read_bytes()))
    done = commwatch("explain", "--json", str(tmp_path / "*.log"), healthy, packed)
    found = json.loads(done.stdout)
    assert found["files"] == [str(broken), str(healthy), str(packed)]
    assert found["n_lines"] == 2 * len(HEALTHY) + len(BROKEN)


def test_standard_input(broken: Path) -> None:
    """``-`` is standard input, packed or not."""
    command = [sys.executable, "-m", "commwatch", "explain", "-"]
    for data in (broken.read_bytes(), gzip.compress(broken.read_bytes())):
        done = subprocess.run(
            command, input=data, capture_output=True, env=clean_env(), timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stderr) == (1, b"")
        assert f"-:{len(BROKEN)}: ".encode() in done.stdout


def test_damaged_archive(broken: Path, tmp_path: Path) -> None:
    """A compressed file that was cut is explained as far as it goes, with a remark."""
    cut = tmp_path / "cut.gz"
    text = broken.read_bytes() + os.urandom(200_000)
    cut.write_bytes(gzip.compress(text)[:-1000])
    done = commwatch("explain", cut)
    assert done.returncode == 1
    assert done.stderr == f"commwatch: {cut}: a damaged compressed file; read as far as it goes\n"
    assert "Cuda failure" in done.stdout


def test_archive_that_unpacks_without_end(broken: Path, tmp_path: Path) -> None:
    """A compressed file that unpacks to far more than its size is read up to a limit, with a remark."""
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(broken.read_bytes()) + gzip.compress(bytes(1 << 20)) * 1000)
    done = commwatch("explain", bomb)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"commwatch: {bomb}: it unpacks to more than 67108864 bytes and 200 times its size; read up to there\n"
    )
    assert "Cuda failure" in done.stdout


@pytest.mark.parametrize("name", ["nope.log", "*.nope", "", "folder", "x" * 300])
def test_asked_wrongly(tmp_path: Path, name: str) -> None:
    """What cannot be read is named in one line, exit code 2."""
    (tmp_path / "folder").mkdir()
    done = commwatch("explain", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / name).rstrip("/") in done.stderr


@pytest.mark.parametrize("data", [b"", b"step 1\nstep 2\n", b"[rank0]: loss 0.5\n", b"export NCCL_DEBUG=INFO\n"])
def test_nothing_recognised(tmp_path: Path, data: bytes) -> None:
    """A text without a line of NCCL or PyTorch is no healthy log: the output says that, and what would print such lines."""
    path = tmp_path / "other"
    path.write_bytes(data)
    done = commwatch("explain", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 NCCL messages" in done.stdout
    assert "No line of NCCL, RCCL, PyTorch, Gloo, MPI or UCX was recognised" in done.stdout
    assert "NCCL_DEBUG=INFO" in done.stdout
    assert "No findings" not in done.stdout


@pytest.mark.parametrize(
    ("lines", "amount"),
    [
        ([said(0, "Using network IB")] * 1204, "1,204 lines of NCCL"),
        (["NCCL version 2.27.3+cuda12.9"], "1 line of NCCL"),
        (["[rank0]: ValueError: x", "[rank1]: ValueError: y"], "2 lines of PyTorch"),
        ([said(0, "Using network IB"), "[rank0]: ValueError: x"], "1 line of NCCL and 1 line of PyTorch"),
    ],
    ids=["nccl", "version", "torch", "both"],
)
def test_no_findings(lines: list[str], amount: str) -> None:
    """That there are no findings is stated with the number of lines that were recognised."""
    account = Account()
    for number, line in enumerate(lines, 1):
        account.add(line, "log", number)
    assert f"No findings in {amount}." in text(account, ["log"], [])


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of a log in which every line is new, a bounded amount is kept; the rest is counted and reported."""
    path = tmp_path / "long.log"
    with path.open("w") as file:
        for n in range(6_000):
            file.write(f"h{n}:{n}:{n} [0] NCCL INFO Channel 00 : {n}[0] -> {n + 1}[0] via SHM/direct/direct\n")
            file.write(f"h{n}:{n}:{n} [0] x.cc:1 NCCL WARN never before: {n}\n")
    account = Account(most_facts=1_000)
    read([str(path)], account)
    assert 800 < len(account.lives) + len(account.warnings) + len(list(account.of(Via))) <= 1_000
    assert account.overflow >= 12_000
    assert account.levels == {"INFO": 6_000, "WARN": 6_000}
