"""Files to texts: compressed ones, archives, folders; what is no text is refused by name or left out."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch_agent.commands.log_files import Read, UnreadableLog, expand, read
from commwatch_agent.model import unpacking
from commwatch_collectors.nccl.account import Account
from tests.helpers import PATIENCE_S, clean_env, commwatch

LINE = "ant:{0}:{0} [0] NCCL INFO Using network IB\n"
TEXT = "".join(LINE.format(pid) for pid in range(1, 4)).encode()

PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def explained(*patterns: Path | str) -> tuple[Account, Read]:
    """What is read for these patterns."""
    files, account = expand(map(str, patterns)), Account()
    return account, read(files.names, account, files.found)


def tar(kind: str, **files: bytes) -> bytes:
    """An archive of these files, compressed if ``kind`` is not empty."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(f"logs/{name}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return PACK[kind](data.getvalue()) if kind else data.getvalue()


def zipped(**files: bytes) -> bytes:
    """An archive of these files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"logs/{name}", content)
    return data.getvalue()


@pytest.mark.parametrize("kind", PACK)
def test_compressed(tmp_path: Path, kind: str) -> None:
    """A compressed log is read under its own name; of a cut one, the lines before the damage are read, with a remark."""
    path, cut = tmp_path / "job.log", tmp_path / "cut.log"
    path.write_bytes(PACK[kind](TEXT))
    account, done = explained(path)
    assert (account.n_lines, done) == (3, Read([str(path)], []))
    cut.write_bytes(PACK[kind](TEXT + os.urandom(1_000_000))[:-1000])
    account, done = explained(cut)
    assert len(account.lives) == 3
    assert done.remarks == [f"{cut}: a damaged compressed file; read as far as it goes"]


@pytest.mark.parametrize("kind", [*PACK, "zip"])
def test_limit_of_the_unpacked_size(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compression, a file that unpacks to far more than its size is read up to a limit, with a remark."""
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", 8 << 20)
    bomb = tmp_path / "bomb"
    zeros = TEXT + bytes(10 << 20)
    bomb.write_bytes(zipped(a=zeros[: 5 << 20], b=zeros[: 5 << 20]) if kind == "zip" else PACK[kind](zeros))
    account, done = explained(bomb)
    assert len(account.lives) == 3
    assert done.remarks == [f"{bomb}: it unpacks to more than 8388608 bytes and 200 times its size; read up to there"]


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
def test_archives(tmp_path: Path, kind: str) -> None:
    """An archive is read as its files, each under its name; those that are no text are left out with a remark."""
    path = tmp_path / "logs.archive"
    files = {"0.log": TEXT, "1.log.gz": gzip.compress(TEXT.replace(b"ant", b"bee")), "x.pt": pickle.dumps({})}
    path.write_bytes(zipped(**files) if kind == "zip" else tar(kind, **files))
    account, done = explained(path)
    assert done.names == [f"{path}/logs/0.log", f"{path}/logs/1.log.gz"]
    assert done.remarks == [f"{path}/logs/x.pt: a pickle of Python, not a log; left out"]
    assert {process.host for process in account.processes} == {"ant", "bee"}
    assert {life.messages for life in account.lives.values()} == {1}


def test_archive_from_a_pipe() -> None:
    """An archive on standard input is read as its files."""
    command = [sys.executable, "-m", "commwatch", "explain", "-"]
    data = tar("gz", **{"0.log": TEXT, "1.log": TEXT})
    done = subprocess.run(command, input=data, capture_output=True, env=clean_env(), timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"2 files: 6 lines, 6 NCCL messages" in done.stdout


def test_deep_archives(tmp_path: Path) -> None:
    """An archive in an archive is read, one that is deeper still is refused."""
    once = tar("", **{"0.log": TEXT})
    twice = tar("", **{"a.tar": once})
    path = tmp_path / "logs"
    path.write_bytes(tar("", **{"b.tar": twice}))
    assert explained(path)[0].n_lines == 3
    path.write_bytes(tar("gz", **{"b.tar.gz": gzip.compress(twice)}))
    with pytest.raises(UnreadableLog, match="an archive without a text"):
        explained(path)


def test_damaged_archives(tmp_path: Path) -> None:
    """Of an archive that was cut, the files before the damage are read; an archive without a text is refused."""
    path = tmp_path / "logs"
    path.write_bytes(tar("", **{"0.log": TEXT, "1.log": TEXT * 1000})[:-20_000])
    account, done = explained(path)
    assert account.n_lines > 3
    assert done.remarks == [f"{path}: a damaged tar file; read as far as it goes"]
    for data in (zipped(**{"0.log": TEXT})[:-30], zipped(x=pickle.dumps({}))):
        path.write_bytes(data)
        with pytest.raises(UnreadableLog):
            explained(path)


def database(path: Path) -> None:
    """A database of SQLite."""
    with sqlite3.connect(path) as opened:
        opened.execute("create table logs (line text)")
        opened.execute("insert into logs values (?)", (TEXT.decode() * 100,))
    opened.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(40), "compressed with zstd; unpack it first: zstd -d"),
        (b"\x04\x22\x4d\x18" + bytes(40), "lz4 -d"),
        (Path(sys.executable).resolve().read_bytes()[:100_000], "ELF"),
        (pickle.dumps({"entries": [TEXT]}), "pickle"),
        (None, "SQLite"),
        (bytes(range(256)) * 500, "a binary file, not a log"),
        (b"\x93NUMPY\x01\0v\0" + bytes(range(256)) * 50, "a binary file, not a log"),
    ],
    ids=["zstd", "lz4", "elf", "pickle", "sqlite", "bytes", "numpy"],
)
def test_no_text(tmp_path: Path, data: bytes | None, why: str) -> None:
    """A file that is no text is refused by name with exit code 2; in a folder it is left out with a remark."""
    logs = tmp_path / "logs"
    logs.mkdir()
    path = logs / "a"
    database(path) if data is None else path.write_bytes(data)
    done = commwatch("explain", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"commwatch: explain: {path}: ")
    assert why in done.stderr
    with pytest.raises(UnreadableLog, match="left out"):
        explained(logs)
    (logs / "b").write_bytes(TEXT)
    account, read_ = explained(logs)
    assert (read_.names, account.n_lines) == ([str(logs / "b")], 3)
    assert len(read_.remarks) == 1
    assert explained(f"{logs}/*")[1].names == [str(logs / "b")]


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(300) + b"\n" + TEXT,
        bytes(100_000) + TEXT,
        TEXT.decode().encode("utf-16"),
        "épreuve à l'été\n".encode("latin-1") * 50 + TEXT,
        b"\x1b[36m(Worker pid=1)\x1b[0m " + TEXT,
        b"\x0e\x0f\x01step\n" + TEXT,
    ],
    ids=["random", "zeros", "utf-16", "latin-1", "colours", "control"],
)
def test_text_with_other_bytes(tmp_path: Path, data: bytes) -> None:
    """A log with some bytes that are no text is read."""
    path = tmp_path / "job.log"
    path.write_bytes(data)
    account, done = explained(path)
    assert (account.levels["INFO"], done.remarks) == (3, [])


def test_folder(tmp_path: Path) -> None:
    """A folder is read as all files in it, as ``torchrun --log-dir`` writes them; each file once."""
    for rank in range(3):
        folder = tmp_path / "job" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(LINE.format(rank))
        (folder / "stdout.log").write_text("")
    os.mkfifo(tmp_path / "job" / "pipe")
    account, done = explained(tmp_path / "job", tmp_path / "job/attempt_0/0/stderr.log")
    assert done.names == [
        str(tmp_path / f"job/attempt_0/{rank}/{name}.log") for rank in range(3) for name in ("stderr", "stdout")
    ]
    assert len(account.lives) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableLog, match="a folder without files"):
        explained(tmp_path / "empty")


def test_folder_of_other_files(tmp_path: Path) -> None:
    """However many files of a folder are left out, the remarks on them are few."""
    for number in range(40):
        (tmp_path / f"{number:02}.pt").write_bytes(pickle.dumps({}))
    (tmp_path / "job.log").write_bytes(TEXT)
    done = commwatch("explain", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 11)
    assert done.stderr.endswith("30 more files were damaged or left out\n")
