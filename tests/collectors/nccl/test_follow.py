"""Log files that are being written: late, rotated, truncated, endless."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import crossing
from commwatch_collectors.nccl import follow
from commwatch_collectors.nccl.follow import Follower
from commwatch_collectors.nccl.input.lines import split_lines
from commwatch_collectors.nccl.matching import LogPattern, Output
from tests.helpers import descriptors


class Taken:
    """What a follower has read, and the follower."""

    def __init__(self, *patterns: Path | str, since: float = 0.0) -> None:
        self.lines: list[str] = []
        self.places: list[tuple[str, int]] = []
        self.follower = Follower(self._take, since)
        self.follower.patterns.update({LogPattern(str(pattern), os.getuid()): None for pattern in patterns})

    def _take(self, texts: Iterable[tuple[int, str]], path: str) -> None:
        for number, line in split_lines(texts):
            self.lines.append(line)
            self.places.append((Path(path).name, number))

    def tick(self, final: bool = False) -> list[str]:
        """The lines that one tick brought."""
        self.lines.clear()
        self.follower.tick(final)
        return list(self.lines)


def test_reads_on(tmp_path: Path) -> None:
    """What is added is read once, line by line; a line without its newline waits for it."""
    log = tmp_path / "log"
    taken = Taken(log)
    assert taken.tick() == []
    log.write_text("one\ntwo\nthr")
    assert taken.tick() == ["one", "two"]
    assert taken.tick() == []
    with log.open("a") as file:
        file.write("ee\n")
    assert taken.tick() == ["three"]
    assert taken.places == [("log", 1), ("log", 2), ("log", 3)]
    assert taken.follower.paths == [str(log)]


def test_last_words(tmp_path: Path) -> None:
    """The final tick reads everything, also past the bound of one tick, and a last line without its newline."""
    log = tmp_path / "log"
    lines = [f"{n} {'x' * 1000}" for n in range(2 * follow.TICK_BYTES // 1000)]
    log.write_text("\n".join(lines) + "\nend")
    assert Taken(log).tick(final=True) == [*lines, "end"]


def test_files_come_late(tmp_path: Path) -> None:
    """Files that appear after the pattern was given are read from their beginning."""
    taken = Taken(tmp_path / "logs" / "host.*")
    assert taken.tick() == []
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "host.1").write_text("a\n")
    (tmp_path / "logs" / "other.1").write_text("not ours\n")
    assert taken.tick() == ["a"]
    (tmp_path / "logs" / "host.2").write_text("b\n")
    assert taken.tick() == ["b"]


def test_files_of_jobs_before(tmp_path: Path) -> None:
    """Files last written to before ``since`` are ignored until they are written to again."""
    log = tmp_path / "log"
    log.write_text("old\n")
    os.utime(log, (1000, 1000))
    taken = Taken(log, since=2000)
    assert taken.tick() == []
    with log.open("a") as file:
        file.write("new\n")
    assert taken.tick() == ["old", "new"]


def test_rotated(tmp_path: Path) -> None:
    """A renamed file is read on under its old name, for its writer still has it; the new one from its beginning."""
    log = tmp_path / "log"
    with log.open("w") as writer:
        taken = Taken(f"{log}*")
        writer.write("one\n")
        writer.flush()
        assert taken.tick() == ["one"]
        log.rename(tmp_path / "log.1")
        log.write_text("new\n")
        writer.write("two\n")
        writer.flush()
        assert sorted(taken.tick()) == ["new", "two"]
        assert taken.tick() == []


def test_truncated(tmp_path: Path) -> None:
    """A truncated file begins again; zeros left by a writer that kept its place are no text."""
    log = tmp_path / "log"
    with log.open("w") as writer:
        taken = Taken(log)
        writer.write("one\ntwo\n")
        writer.flush()
        assert taken.tick() == ["one", "two"]
        os.truncate(log, 0)
        assert taken.tick() == []
        writer.write("three\n")
        writer.flush()
        assert taken.tick() == ["three"]


def test_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was removed is read on while its writer writes, and let go of when nothing comes any more."""
    monkeypatch.setattr(follow, "_PATIENCE", 2)
    log = tmp_path / "log"
    with log.open("w") as writer:
        taken = Taken(log)
        writer.write("one\n")
        writer.flush()
        assert taken.tick() == ["one"]
        log.unlink()
        writer.write("two\nrest")
        writer.flush()
        assert taken.tick() == ["two"]
        assert [taken.tick() for _ in range(3)] == [[], [], ["rest"]]
        assert taken.follower.paths == []


def test_a_tick_is_bounded(tmp_path: Path) -> None:
    """One tick reads no more than its bound, over all files; later ones go on where it stopped."""
    line = "x" * 99
    count = follow.TICK_BYTES // 100
    for name in "abc":
        (tmp_path / name).write_text(f"{line}\n" * count)
    taken = Taken(tmp_path / "*")
    first = taken.tick()
    assert 0 < len(first) <= count + follow._CHUNK // 100 + 1
    total = len(first)
    while more := taken.tick():
        total += len(more)
    assert total == 3 * count


def test_too_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a log is too far ahead, what lies between is skipped and counted, and the newest is read."""
    monkeypatch.setattr(follow, "MOST_BEHIND", 10_000)
    monkeypatch.setattr(follow, "_KEPT_BEHIND", 1_000)
    log = tmp_path / "log"
    log.write_text("".join(f"{n:09d}\n" for n in range(5_000)))
    taken = Taken(log)
    assert taken.tick() == [f"{n:09d}" for n in range(4_900, 5_000)]
    assert taken.follower.skipped_bytes == 49_000
    assert taken.places[0] == ("log from byte 49000", 1)


def test_unreadable(tmp_path: Path) -> None:
    """A path that cannot be read is named with the reason, the others are read, and it is forgotten once it can be."""
    (tmp_path / "good").write_text("fine\n")
    (tmp_path / "folder").mkdir()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    taken = Taken(tmp_path / "*", loop)
    assert taken.tick() == ["fine"]
    assert list(taken.follower.troubles) == [str(loop)]
    denied = Taken(tmp_path / "good" / "below")
    assert denied.tick() == []
    loop.unlink()
    loop.write_text("now\n")
    assert taken.tick() == ["now"]
    assert taken.follower.troubles == {}


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of files is open at a time; that others wait is reported once; they are read once some are quiet."""
    monkeypatch.setattr(follow, "MOST_FILES", 3)
    for name in "abcdef":
        (tmp_path / name).write_text(f"{name}\n")
    taken = Taken(tmp_path / "*")
    assert taken.tick() == ["a", "b", "c"]
    assert list(taken.follower.troubles.values()) == [
        "more than 3 files: the others are read once some of these are quiet"
    ]
    assert [taken.tick(), taken.tick()] == [[], ["d", "e", "f"]]
    assert taken.follower.troubles == {}
    assert taken.follower.paths == [str(tmp_path / name) for name in "abcdef"]


def test_quiet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was closed in favour of another is read on from its place when it grows, with its line numbers, or anew if it shrinks."""
    monkeypatch.setattr(follow, "MOST_FILES", 1)
    first, second = tmp_path / "a", tmp_path / "b"
    taken = Taken(tmp_path / "*", since=1000)
    first.write_text("one\ntw")
    assert [taken.tick(), taken.tick()] == [["one"], []]
    second.write_text("other\n")
    assert [taken.tick(), taken.tick()] == [["other"], []]
    with first.open("a") as file:
        file.write("o\n")
    os.utime(first, (1, 1))
    assert [taken.tick(), taken.tick()] == [["two"], []]
    assert taken.places == [("a", 1), ("b", 1), ("a", 2)]
    second.write_text("x\n")
    assert [taken.tick(), taken.tick()] == [["x"], []]
    with second.open("a") as file:
        file.write("last\nwords")
    assert [taken.tick(), taken.tick()] == [["last"], []]
    assert [taken.tick() for _ in range(5)] == [[]] * 5
    third = tmp_path / "c"
    third.write_text("three\n")
    assert taken.tick() == ["three"]
    second.unlink()
    assert taken.tick() == ["words"]
    assert taken.follower.paths == [str(first), str(third)]


def test_long_line_of_a_quiet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet file keeps no long incomplete line in memory; the line is whole all the same once it ends, with its number."""
    monkeypatch.setattr(follow, "MOST_FILES", 1)
    first, second = tmp_path / "a", tmp_path / "b"
    taken = Taken(tmp_path / "*")
    first.write_text("one\n" + "x" * 50_000)
    assert [taken.tick(), taken.tick()] == [["one"], []]
    second.write_text("other\n")
    assert [taken.tick(), taken.tick()] == [["other"], []]
    (quiet,) = taken.follower._quiet.values()
    assert len(quiet.lines._rest) == 0
    with first.open("a") as file:
        file.write("y\n")
    assert [taken.tick(), taken.tick()] == [["x" * 50_000 + "y"], []]
    assert taken.places[-1] == ("a", 2)


def test_pause_after_a_long_look(tmp_path: Path) -> None:
    """After a look that took long there is no other for a multiple of that time; what is added to known files is read meanwhile."""
    now = [100.0]
    taken = Taken(tmp_path / "*")
    taken.follower = Follower(taken._take, clock=lambda: now[0])
    taken.follower.patterns[LogPattern(str(tmp_path / "*"), os.getuid())] = None
    taken.follower.quick_s = 0.0
    (tmp_path / "a").write_text("one\n")
    assert taken.tick() == ["one"]
    (tmp_path / "b").write_text("other\n")
    with (tmp_path / "a").open("a") as file:
        file.write("two\n")
    assert taken.tick() == ["two"]
    now[0] += 1000
    assert taken.tick() == ["other"]


def test_patterns_share_the_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All patterns of a look together take a limited number of entries, also where none of them matches; files that are named are read all the same."""
    monkeypatch.setattr(follow, "MOST_ENTRIES", 20)
    for number in range(30):
        (tmp_path / f"x{number}").touch()
    (tmp_path / "z").write_text("one\n")
    looked: list[int] = []
    names = crossing.Folder.names

    def counted(folder: crossing.Folder, pattern: str, most: int) -> tuple[int, list[str]]:
        found = names(folder, pattern, most)
        looked.append(found[0])
        return found

    monkeypatch.setattr(crossing.Folder, "names", counted)
    taken = Taken(*(tmp_path / f"none{number}*" for number in range(5)), tmp_path / "z")
    assert taken.tick() == ["one"]
    assert sum(looked) == 20


def test_deleted_file_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted file, which could not be opened again, is read as long as its writer may write; another waits for that time."""
    monkeypatch.setattr(follow, "MOST_FILES", 1)
    monkeypatch.setattr(follow, "_PATIENCE", 3)
    log = tmp_path / "log"
    with log.open("w") as writer:
        taken = Taken(tmp_path / "*")
        writer.write("one\n")
        writer.flush()
        assert taken.tick() == ["one"]
        log.unlink()
        assert taken.tick() == []
        (tmp_path / "other").write_text("other\n")
        writer.write("two\n")
        writer.flush()
        assert taken.tick() == ["two"]
        assert [line for _ in range(6) for line in taken.tick()] == ["other"]


def test_quiet_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more files are closed in favour of others than are remembered, because each would be read twice."""
    monkeypatch.setattr(follow, "MOST_FILES", 1)
    monkeypatch.setattr(follow, "_MOST_QUIET", 2)
    monkeypatch.setattr(follow, "_PATIENCE", 3)
    for name in "abcdef":
        (tmp_path / name).write_text(f"{name}\n")
    taken = Taken(tmp_path / "*")
    assert [line for _ in range(20) for line in taken.tick()] == ["a", "b", "c"]
    assert len(taken.follower.troubles) == 1
    for name in "abc":
        (tmp_path / name).unlink()
    assert [line for _ in range(20) for line in taken.tick()] == ["d", "e", "f"]


def test_lets_go(tmp_path: Path) -> None:
    """``close`` leaves no descriptor."""
    before = len(descriptors())
    (tmp_path / "log").write_text("one\n")
    taken = Taken(tmp_path / "log")
    taken.tick()
    assert len(descriptors()) == before + 1
    taken.follower.close()
    assert len(descriptors()) == before


# -- the output of processes


class TakenOutput(Taken):
    """What is read of a file that is the output of processes."""

    def __init__(self, log: Path, start: int, *more: Path) -> None:
        super().__init__(*more)
        about = log.stat()
        self.log, self.output = log, Output((about.st_dev, about.st_ino), start)

    def tick(self, final: bool = False, **change: Any) -> list[str]:
        """The lines that one tick brought; ``change``: what is known of the output from now on."""
        self.output = self.output._replace(**change)
        patterns = {each: None for each in self.follower.patterns if each.output is None}
        self.follower.patterns = {**patterns, LogPattern(str(self.log), os.getuid(), self.output): None}
        return super().tick(final)


def add(log: Path, text: str) -> None:
    """Append to a file."""
    with log.open("a") as file:
        file.write(text)


def test_output_from_its_begin(tmp_path: Path) -> None:
    """What a file has before the processes begin is of others; the numbers of the lines are those of the file."""
    log = tmp_path / "job.log"
    log.write_text("old\nold\n")
    taken = TakenOutput(log, 8)
    assert taken.tick() == []
    add(log, "new\n")
    assert taken.tick() == ["new"]
    assert taken.places == [("job.log", 3)]


def test_output_that_was_truncated(tmp_path: Path) -> None:
    """A file that has fewer bytes than at the begin has been truncated since, and is read from its first line."""
    log = tmp_path / "job.log"
    log.write_text("new\n")
    taken = TakenOutput(log, 8)
    assert taken.tick() == ["new"]
    log.write_text("a\n")
    assert taken.tick() == ["a"]
    assert taken.places == [("job.log", 1), ("job.log", 1)]


def test_output_with_much_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too much before the begin, lines have no numbers of the file: its name shows from where they are counted."""
    monkeypatch.setattr(follow, "MOST_COUNTED", 10)
    log = tmp_path / "job.log"
    log.write_text("old\n" * 5)
    taken = TakenOutput(log, 20)
    add(log, "a\nb\n")
    assert taken.tick() == ["a", "b"]
    assert taken.places == [("job.log from byte 20", 1), ("job.log from byte 20", 2)]
    log.write_text("c\n")
    taken.tick()
    assert taken.places[2:] == [("job.log", 1)]


def test_counting_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look counts lines in so many bytes at most, of all files together; the others wait."""
    monkeypatch.setattr(follow, "MOST_COUNTED", 30)
    taken = Taken()
    for name in ("a", "b", "c"):
        log = tmp_path / name
        log.write_text("old\n" * 5 + f"{name}\n")
        output = Output((log.stat().st_dev, log.stat().st_ino), 20)
        taken.follower.patterns[LogPattern(str(log), os.getuid(), output)] = None
    assert [taken.tick() for _ in range(4)] == [["a"], ["b"], ["c"], []]
    assert taken.places == [("a", 6), ("b", 6), ("c", 6)]


def test_another_file_of_that_name(tmp_path: Path) -> None:
    """A file that has taken the name of an output is not read; the renamed one is read on."""
    log = tmp_path / "job.log"
    log.write_text("one\n")
    taken = TakenOutput(log, 0)
    assert taken.tick() == ["one"]
    log.rename(tmp_path / "job.log.1")
    log.write_text("of others\n")
    add(tmp_path / "job.log.1", "two\n")
    assert taken.tick() == ["two"]
    assert TakenOutput(tmp_path / "job.log.1", 0).tick() == ["one", "two"]


def test_output_that_is_over(tmp_path: Path) -> None:
    """Once the processes have ended, what is there is read to its end, and what is added later is not."""
    log = tmp_path / "job.log"
    log.write_text("one\n")
    taken = TakenOutput(log, 0)
    assert taken.tick() == ["one"]
    add(log, "two\n")
    assert taken.tick(is_over=True) == ["two"]
    add(log, "of others\n")
    assert taken.tick() == []
    assert taken.tick(is_over=False) == []  # what lies between may be of others
    late = TakenOutput(log, 4)
    assert late.tick(is_over=True) == ["two", "of others"]


def test_output_without_lines_of_nccl(tmp_path: Path) -> None:
    """Where NCCL writes to files of its own, its lines in an output are copies: all others are read, with their numbers."""
    log = tmp_path / "job.log"
    log.write_text(
        "a\nh:1:2 [0] x.cc:3 NCCL WARN what\nh:1:2 [0] NCCL INFO more\n[rank0]: NCCL error in: y.cpp:4, NCCL version 2.27.3\n"
    )
    taken = TakenOutput(log, 0)
    assert taken.tick(without_nccl=True) == ["a", "", "", "[rank0]: NCCL error in: y.cpp:4, NCCL version 2.27.3"]
    add(log, "h:1:2 [0] NCCL INFO last")
    assert taken.tick(final=True) == [""]
    assert taken.places[3:] == [("job.log", 4), ("job.log", 5)]


@pytest.mark.parametrize("link", [False, True])
def test_output_that_is_nccls_file(tmp_path: Path, link: bool) -> None:
    """A file that is both NCCL's and the output is read once, with NCCL's lines."""
    log = tmp_path / "job.log"
    log.write_text("h:1:2 [0] NCCL INFO one\n")
    if link:
        os.link(log, tmp_path / "z.log")
    taken = TakenOutput(log, 0, tmp_path / "z.log" if link else log)
    assert taken.tick(without_nccl=True) == ["h:1:2 [0] NCCL INFO one"]
    add(log, "h:1:2 [0] NCCL INFO two\n")
    assert taken.tick() == ["h:1:2 [0] NCCL INFO two"]


def test_quiet_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that was closed in favour of another file is read on where its reading stopped, and not beyond its end."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old\none\n")
    taken = TakenOutput(first, 4, second)
    taken.follower.most_files = 1
    assert taken.tick() == ["one"]
    taken.tick()
    second.write_text("a\n")
    assert taken.tick() + taken.tick() == ["a"]
    taken.tick()
    add(first, "two\n")
    assert taken.tick() + taken.tick() == ["two"]
    assert ("first", 3) in taken.places
    taken.tick(is_over=True)
    add(first, "of others\n")
    add(second, "b\n")
    assert taken.tick() + taken.tick() + taken.tick() == ["b"]


def test_output_out_of_sight(tmp_path: Path) -> None:
    """An output that is not there, such as that of a container, or another file in its place is a trouble; one that was read before is none."""
    log, folder = tmp_path / "job.log", tmp_path / "logs"
    log.write_text("one\n")
    taken = TakenOutput(log, 0)
    taken.output = taken.output._replace(inode=(0, 0))
    assert taken.tick() == []
    assert taken.follower.troubles == {str(log): "another file has this name"}
    for missing in (tmp_path / "none", folder / "job.log"):
        taken.log = missing
        taken.tick()
        assert taken.follower.troubles.pop(str(missing)) == "not found"
    there = TakenOutput(log, 0)
    assert there.tick() == ["one"]
    log.unlink()
    there.tick()
    assert there.follower.troubles == {}
