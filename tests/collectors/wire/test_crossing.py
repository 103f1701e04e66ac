"""The gate for files that cross users: what it opens, whose files it accepts, and that an attempt has no effect."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch.wire import crossing
from commwatch.wire.crossing import ANYBODY, Refused
from tests.helpers import NOBODY, PATIENCE_S, PLANTED, clean_env, descriptors, needs, wait_for

MOST = 1000
OTHER = NOBODY - 1


@pytest.mark.parametrize("what", PLANTED)
def test_planted(what: str, tmp_path: Path) -> None:
    """A FIFO, a link to a device, a file without end: none is waited for, followed or read."""
    path = tmp_path / "file"
    why = PLANTED[what](path)
    with pytest.raises(OSError, match=why) as raised:
        crossing.read(path, MOST, ANYBODY)
    assert raised.value.filename == str(path)


def test_as_large_as_may_be(tmp_path: Path) -> None:
    """A file of the most bytes is read whole; one byte more, and it is refused, as is one that does not say how long it is."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * MOST)
    assert crossing.read(path, MOST, ANYBODY) == b"x" * MOST
    path.write_bytes(b"x" * (MOST + 1))
    for too_large in (path, Path("/proc/meminfo")):
        with pytest.raises(Refused, match="larger than"):
            crossing.read(too_large, MOST, ANYBODY)


def test_no_effect(tmp_path: Path) -> None:
    """A pipe in the place of a file is not even opened: a writer that waits for a reader of it goes on waiting."""
    pipe = tmp_path / "file"
    os.mkfifo(pipe)
    opened: list[int] = []
    writer = threading.Thread(target=lambda: opened.append(os.open(pipe, os.O_WRONLY)), daemon=True)
    writer.start()
    tasks = Path(f"/proc/self/task/{writer.native_id}/syscall")
    wait_for(lambda: tasks.read_text() != "running\n", "the writer to wait")
    for _ in range(100):
        with pytest.raises(Refused, match="not a file"):
            crossing.read(pipe, MOST, ANYBODY)
        with pytest.raises(Refused, match="not a file"):
            crossing.open_file(pipe, ANYBODY, flags=os.O_WRONLY)
    assert opened == []
    reader = os.open(pipe, os.O_RDONLY)
    writer.join(PATIENCE_S)
    for fd in (reader, *opened):
        os.close(fd)


def test_kinds(tmp_path: Path) -> None:
    """Each kind is opened where it is meant, and refused where another is."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    kinds = {"pipe": stat.S_IFIFO, "file": stat.S_IFREG, "folder": stat.S_IFDIR}
    for name, kind in kinds.items():
        assert crossing.look(tmp_path / name, ANYBODY, kind=kind).st_mode
        for other in set(kinds.values()) - {kind}:
            with pytest.raises(Refused, match="not a"):
                crossing.open_file(tmp_path / name, ANYBODY, kind=other)


def test_no_descriptor_stays(tmp_path: Path) -> None:
    """Neither a success nor a refusal leaves a descriptor open."""
    before = descriptors()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    crossing.read(tmp_path / "file", MOST, ANYBODY)
    for path in ("none", "none/below", "file/below", "loop", "loop/below"):
        with pytest.raises(OSError, match=r"."):
            crossing.read(tmp_path / path, MOST, ANYBODY)
    with crossing.folder(tmp_path) as where:
        where.write("new", b"x", 0o600)
        assert where.names("*")[1] == ["file", "loop", "new"]
    assert descriptors() == before


# -- owners


#: Reads a file as another user; prints its content, or why it is refused.
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from commwatch.wire import crossing
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    print(crossing.read(Path(sys.argv[1]), 1000, getattr(crossing, sys.argv[2])()).decode())
except OSError as error:
    print(error.strerror)
"""


def as_nobody(path: Path, trust: str) -> str:
    """The content that another user reads with a trust, or why the file is refused."""
    command = [sys.executable, "-c", AS_NOBODY, str(path), trust]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("owner", "group", "mode", "says"),
    [
        (NOBODY, NOBODY, 0o755, "content"),
        (0, 0, 0o755, "content"),
        (OTHER, 0, 0o755, f"belongs to uid {OTHER}; set COMMWATCH_GROUP for trainer and agent"),
        (OTHER, NOBODY, 0o755, f"belongs to uid {OTHER}; set COMMWATCH_GROUP for trainer and agent"),
        (OTHER, NOBODY, 0o2775, "content"),
    ],
)
def test_records(owner: int, group: int, mode: int, says: str, public: Path) -> None:
    """A record is read where it is this user's, root's, or of the group that the directory is shared with."""
    path = public / "file"
    path.write_text("content")
    path.chmod(0o644)
    os.chown(path, owner, group)
    os.chown(public, -1, NOBODY)
    public.chmod(mode)
    assert as_nobody(path, "trainers") == says


def _shared(path: Path, mode: int) -> None:
    """Share a file with a group that has other members."""
    os.chown(path, -1, OTHER)
    path.chmod(mode)


Case = Callable[[Path], object]
STRICT: dict[str, tuple[Case, str]] = {
    "of mine": (lambda path: os.chown(path, NOBODY, NOBODY), "content"),
    "of root": (lambda path: os.chown(path, 0, 0), "content"),
    "of another": (
        lambda path: os.chown(path, OTHER, NOBODY),
        f"belongs to uid {OTHER}, not to this user or root; use a file of your own",
    ),
    "written by all": (lambda path: path.chmod(0o646), "others may write to it; chmod go-w PATH"),
    "written by a group": (lambda path: _shared(path, 0o664), "others may write to it; chmod go-w PATH"),
    "written by root's group": (lambda path: path.chmod(0o664), "content"),
    "folder of another": (
        lambda path: os.chown(path.parent, OTHER, NOBODY),
        f"its folder FOLDER belongs to uid {OTHER}, not to this user or root; use a folder of your own",
    ),
    "folder above of another": (
        lambda path: os.chown(path.parents[1], OTHER, NOBODY),
        f"its folder ABOVE belongs to uid {OTHER}, not to this user or root; use a folder of your own",
    ),
    "folder for all": (
        lambda path: path.parent.chmod(0o777),
        "others may write to its folder FOLDER; chmod go-w FOLDER",
    ),
    "folder for a group": (
        lambda path: _shared(path.parent, 0o2775),
        "others may write to its folder FOLDER; chmod go-w FOLDER",
    ),
    "folder above for all": (
        lambda path: path.parents[1].chmod(0o777),
        "others may write to its folder ABOVE; chmod go-w ABOVE",
    ),
    "folder as /tmp": (lambda path: path.parent.chmod(0o1777), "content"),
}


@pytest.mark.parametrize("case", STRICT)
def test_what_decides(case: str, public: Path) -> None:
    """A file that decides what commwatch does is read only if no user except this one and root can have changed it."""
    path = public / "below" / "file"
    path.parent.mkdir(mode=0o755)
    path.write_text("content")
    path.chmod(0o644)
    change, says = STRICT[case]
    change(path)
    says = says.replace("PATH", str(path)).replace("FOLDER", str(path.parent)).replace("ABOVE", str(public))
    assert as_nobody(path, "operator") == says


@pytest.mark.parametrize("owner", [0, NOBODY, OTHER])
@pytest.mark.parametrize("where", ["", "shared"])
def test_links_that_the_operator_chose(owner: int, where: str, public: Path) -> None:
    """A link of this user or of root is followed to a file that decides, another user's is not; also in a folder such as ``/tmp``."""
    (public / "shared").mkdir()
    (public / "shared").chmod(0o1777)
    (public / "target").write_text("content")
    (public / "target").chmod(0o644)
    link = public / where / "link"
    link.symlink_to(public / "target")
    os.chown(link, owner, owner, follow_symlinks=False)
    assert as_nobody(link, "operator").startswith("Too many levels of symbolic links" if owner == OTHER else "content")


def test_mounts_of_kubernetes(public: Path) -> None:
    """A ConfigMap is read: a read-only mount of root whose folder has mode 0777, with links that root has made."""
    needs(os.getuid() == 0, "root, to mount")
    mount = public / "mount"
    (mount / "..data_1").mkdir(parents=True)
    (mount / "..data").symlink_to("..data_1")
    (mount / "..data_1" / "file").write_text("content")
    (mount / "file").symlink_to("..data/file")
    for path, mode in ((mount, 0o777), (mount / "..data_1", 0o755), (mount / "..data_1" / "file", 0o644)):
        path.chmod(mode)
    assert as_nobody(mount / "file", "operator").startswith(f"others may write to its folder {mount}")
    subprocess.run(["mount", "--bind", "-o", "ro", mount, mount], check=True)
    try:
        assert as_nobody(mount / "file", "operator") == "content"
    finally:
        subprocess.run(["umount", mount], check=True)


#: Says whether a file that its group may write to is accepted, for a user and groups by name: NAME=MEMBER,...
PRIVATE = """
import grp, os, pwd, sys, types
from pathlib import Path
from commwatch.wire import crossing
uid, name, members = int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",") if sys.argv[4] else []
pwd.getpwuid = lambda uid: types.SimpleNamespace(pw_name="me", pw_gid=uid)
grp.getgrgid = lambda gid: types.SimpleNamespace(gr_name=name, gr_gid=gid, gr_mem=members)
os.setgroups([]); os.setgid(uid); os.setuid(uid)
try:
    print(crossing.read(Path(sys.argv[1]), 1000, crossing.operator()).decode())
except OSError as error:
    print(error.strerror.partition(";")[0])
"""


@pytest.mark.parametrize(
    ("name", "members", "says"),
    [
        ("me", "", "content"),
        ("me", "me", "content"),
        ("me", "me,you", "others may write to it"),
        ("team", "", "others may write to it"),
    ],
)
def test_private_groups(name: str, members: str, says: str, public: Path) -> None:
    """A file that a group may write to is accepted if that is the private group of its owner: of the same name, without other members."""
    path = public / "file"
    path.write_text("content")
    path.chmod(0o664)
    os.chown(path, NOBODY, NOBODY)
    command = [sys.executable, "-c", PRIVATE, str(path), str(NOBODY), name, members]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == says


def test_one_user(public: Path) -> None:
    """Of a user's files that a job names, root reads those of that user: not its own, not another's, and none behind a link in a shared folder."""
    (public / "folder").mkdir()
    for name, owner in (("theirs", NOBODY), ("mine", 0), ("other", OTHER)):
        (public / name).write_text(name)
        os.chown(public / name, owner, owner)
        (public / "folder" / name).symlink_to(public / name)
    trust = crossing.user(NOBODY)
    os.chown(public / "folder" / "theirs", NOBODY, NOBODY, follow_symlinks=False)
    assert crossing.read(public / "theirs", MOST, trust) == b"theirs"
    for name, uid in (("mine", 0), ("other", OTHER)):
        with pytest.raises(Refused, match=f"belongs to uid {uid}"):
            crossing.read(public / name, MOST, trust)
    # The links are below /tmp, where all users can put one.
    for name in ("theirs", "mine", "other"):
        with pytest.raises(OSError, match="symbolic links"):
            crossing.read(public / "folder" / name, MOST, trust)


def test_root_of_another(tmp_path: Path) -> None:
    """A path of a process in a container begins at the root of that process, and no ``..`` and no link leads out of it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "etc").mkdir(parents=True)
    (inside / "etc" / "file").write_text("inside")
    outside.mkdir()
    (outside / "file").write_text("outside")
    root = os.open(inside, os.O_PATH | os.O_DIRECTORY)
    try:
        for path in ("/etc/file", "etc/file", "/../../etc/file", "/etc/../etc/file"):
            fd = crossing.open_file(Path(path), ANYBODY, start=root)
            with open(fd) as file:
                assert file.read() == "inside"
        (inside / "out").symlink_to(outside / "file")
        (inside / "up").symlink_to("../../outside/file")
        for path in ("/out", "/up", "/../outside/file"):
            with pytest.raises(FileNotFoundError):
                crossing.look(Path(path), ANYBODY, start=root)
    finally:
        os.close(root)


def test_link_in_a_folder_of_another(tmp_path: Path) -> None:
    """A link of a trusted user is followed in that user's folder, and not in another's, who may have put it there."""
    needs(os.getuid() == 0, "root, to give files away")
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "file").write_text("theirs")
    (home / "link").symlink_to("/file")
    for path in (tmp_path / "file", home / "link"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        os.chown(home, NOBODY, NOBODY)
        assert crossing.look(Path("/home/link"), crossing.user(NOBODY), start=root).st_size == 6
        os.chown(home, OTHER, OTHER)
        with pytest.raises(Refused, match="symbolic links"):
            crossing.look(Path("/home/link"), crossing.user(NOBODY), start=root)
    finally:
        os.close(root)


# -- writing


@pytest.mark.parametrize("planted", ["link", "fifo"])
@pytest.mark.parametrize("atomic", [False, True])
def test_create(planted: str, atomic: bool, tmp_path: Path) -> None:
    """In place of a link or a FIFO a new file is made: nothing is written through either."""
    (tmp_path / "checkpoint").write_text("mine")
    path = tmp_path / "new"
    hidden = tmp_path / f".new.{os.getpid()}"
    for each in (path, hidden):
        each.symlink_to("checkpoint") if planted == "link" else os.mkfifo(each)
    if atomic:
        crossing.write(path, "new", 0o640)
        assert not hidden.exists()
    else:
        with open(crossing.create(path, 0o640), "w") as file:
            file.write("new")
    assert (path.read_text(), path.is_symlink(), path.stat().st_mode & 0o777) == ("new", False, 0o640)
    assert (tmp_path / "checkpoint").read_text() == "mine"


def test_no_folder_behind_a_link(tmp_path: Path) -> None:
    """Where others share a folder, a link in the place of a folder below it is not followed: nothing behind it is read, written or removed."""
    shared, precious = tmp_path / "run", tmp_path / "precious"
    shared.mkdir()
    shared.chmod(0o2770)
    precious.mkdir()
    (precious / "7.json").write_text("mine")
    (shared / "logs").symlink_to(precious)
    for attempt in (
        lambda: crossing.read(shared / "logs" / "7.json", MOST, ANYBODY),
        lambda: crossing.write(shared / "logs" / "7.json", "theirs", 0o600),
        lambda: os.close(crossing.create(shared / "logs" / "7.json", 0o600)),
        lambda: crossing.folder(shared / "logs").__enter__(),
    ):
        with pytest.raises(OSError, match="symbolic links"):
            attempt()
    assert (precious / "7.json").read_text() == "mine"


def test_stays_the_same_folder(tmp_path: Path) -> None:
    """A folder that is open stays the same one when another is put in its place."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a").write_text("first")
    with crossing.folder(tmp_path / "logs") as where:
        (tmp_path / "logs").rename(tmp_path / "moved")
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "a").write_text("second")
        assert where.read("a", MOST, ANYBODY) == (b"first", os.getuid())
        where.remove("a")
    assert (tmp_path / "logs" / "a").read_text() == "second"
    assert not (tmp_path / "moved" / "a").exists()


def test_kept_folder(tmp_path: Path) -> None:
    """A kept folder is opened again once it is removed, or after its uses if another has its path; in between it is the same one."""
    path = tmp_path / "kept"
    kept = crossing.KeptFolder(path, uses=3)
    with pytest.raises(FileNotFoundError):
        kept.folder()
    path.mkdir()
    first = kept.folder().look(".").st_ino
    path.rmdir()
    (tmp_path / "filler").mkdir()  # so that the next folder has another inode
    path.mkdir()
    second = kept.folder().look(".").st_ino
    assert second not in (first, 0)
    path.rename(tmp_path / "away")
    path.mkdir()
    assert [kept.folder().look(".").st_ino for _ in range(3)] == [second, second, path.stat().st_ino]
    kept.close()


def test_kept_folder_notes_its_mode(tmp_path: Path) -> None:
    """What a kept folder accepts follows its group and mode as they are now."""
    (tmp_path / "ring").touch()
    kept = crossing.KeptFolder(tmp_path)
    kept.folder()
    tmp_path.chmod(0o2770)
    assert kept.folder().about.st_mode & stat.S_ISGID
    with crossing.folder(tmp_path) as where:
        (tmp_path / "in").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "in")
        where.folder("in").close()
        for name in ("link", "ring"):
            with pytest.raises(OSError, match=r"symbolic|ot a directory"):
                where.folder(name)
    kept.close()


def test_names_are_bounded(tmp_path: Path) -> None:
    """Of a folder with any number of files only so many entries are looked at."""
    for number in range(50):
        (tmp_path / f"{number}.json").touch()
    with crossing.folder(tmp_path) as where:
        looked, names = where.names("*.json", 20)
    assert (looked, len(names)) == (20, 20)


def test_locks(tmp_path: Path) -> None:
    """A file to lock is made once, and opened after that; another user's is refused, and a link is not followed."""
    needs(os.getuid() == 0, "root, to give a file away")
    lock = tmp_path / "agent.lock"
    os.close(crossing.lock_file(lock, 0o640))
    inode = lock.stat().st_ino
    os.close(crossing.lock_file(lock, 0o640))
    assert (lock.stat().st_ino, lock.stat().st_mode & 0o777) == (inode, 0o640)
    os.chown(lock, OTHER, OTHER)
    with pytest.raises(Refused, match=f"belongs to uid {OTHER}"):
        crossing.lock_file(lock, 0o640)
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        crossing.lock_file(lock, 0o640)
    assert not (tmp_path / "elsewhere").exists()


def test_trust_is_named() -> None:
    """No function of the gate opens a file without a word on whose it may be."""
    for name in ("open_file", "look", "read"):
        function = getattr(crossing, name)
        assert "trust" not in (function.__kwdefaults__ or {})
        assert function.__defaults__ is None
