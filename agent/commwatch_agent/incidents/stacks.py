"""Python stacks as ``py-spy`` prints them: what the main thread does, and what it does longer than that of another rank. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

#: A frame: function, file and line.
_FRAME = re.compile(r"^\s*(?P<function>\S.*?) \((?P<file>[^()]+):(?P<line>\d+)\)$")
#: A stack that ``py-spy record`` counted: the frames of a thread, the outermost first, and how often it was seen. Threads that Python's module
#: ``threading`` did not start have no name; so has the main thread where the module is not imported.
_COUNTED = re.compile(r"^thread \([^()]*\)(?P<main>: MainThread)?;(?P<frames>.*) (?P<seen>\d+)$", re.MULTILINE)
#: A place counts as that of a late rank if it spends so much more of its time there than another rank.
_LEAST_MORE = 0.1
#: Part of the difference that a place must have to be named.
_NEARLY = 0.9
#: Begins a thread.
_THREAD = re.compile(r"^(?=Thread )", re.MULTILINE)
#: Files whose frames are the outermost of each thread of ``threading``; and those of the probe.
_STARTS, _OF_THE_PROBE = re.compile(r"/threading\.py$"), re.compile(r"/commwatch/(?:api|probe|wire)/[^/]")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "<frozen ", "/commwatch/probe/")


def main_thread(text: str) -> list[str]:
    """Return the frames of the main thread, the innermost first, as ``load (data/train.py:88)``; of the first thread if none is the main one.

    Args:
        text: as ``py-spy dump`` prints it, the innermost frame of each thread first.
    """
    threads = _THREAD.split(text)[1:]
    found = [thread for thread in threads if "MainThread" in thread.partition("\n")[0]] or threads[:1]
    return [line.strip() for line in "".join(found).splitlines()[1:] if _FRAME.match(line)]


def of_trainer(text: str) -> str:
    """Return stacks as ``py-spy dump`` prints them without the threads that the probe started."""
    head, *threads = _THREAD.split(text)
    return "".join([head, *(thread for thread in threads if not _is_of_the_probe(thread))]).rstrip()


def _is_of_the_probe(thread: str) -> bool:
    title, *lines = thread.splitlines()
    files = [found["file"] for line in reversed(lines) if (found := _FRAME.match(line))]
    first = next((file for file in files if not _STARTS.search(file)), "")
    return "MainThread" not in title and bool(_OF_THE_PROBE.search(first))


def place_of(text: str) -> str:
    """Return where the main thread of a stack is, as ``load (train.py:88)``: in the user's code, if there is any; empty: not known."""
    return _place(main_thread(text))


def _place(lines: Iterable[str]) -> str:
    return next(iter(_places(lines)), "")


def _places(lines: Iterable[str]) -> list[str]:
    """Return the places of a stack in the user's code, the innermost first; of one that has none, that of the innermost frame."""
    frames = [found for line in lines if (found := _FRAME.match(line))]
    of_user = [frame for frame in frames if is_of_user(frame["file"])]
    shown = of_user or frames[:1]
    return [f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})" for frame in shown]


def is_of_user(frame: str) -> bool:
    """Return whether a frame, or the file of one, is the user's."""
    return not any(part in frame for part in _LIBRARIES)


def counted(text: str) -> Counter[tuple[str, ...]]:
    """Return how often the main thread was seen in each stack, the innermost frame first; where no thread has that name, each without a name.

    Args:
        text: as ``py-spy record --format raw --threads`` prints it.
    """
    found = Counter[tuple[str, ...]]()
    seen = list(_COUNTED.finditer(text))
    for match in [each for each in seen if each["main"]] or seen:
        found[tuple(reversed(match["frames"].split(";")))] += int(match["seen"])
    return found


def shares(stacks: Mapping[tuple[str, ...], int]) -> dict[str, float]:
    """Return which part of the time, 0 to 1, a thread was at each place, as ``place_of`` names it, or in what is called there."""
    at = Counter[str]()
    for frames, seen in stacks.items():
        at.update(dict.fromkeys(_places(frames), seen))
    total = sum(stacks.values())
    return {place: seen / total for place, seen in at.items()}


def longer_at(stacks: Mapping[tuple[str, ...], int], other: Mapping[str, float]) -> str:
    """Return the place where a late rank spends more of its time than another rank; empty: there is none.

    A place that both come to is not it, but the call by which only the late one does: the innermost that has nearly all of the difference.

    Args:
        other: of the other rank, as ``shares`` returns it; empty: not known.
    """
    often = sorted(stacks, key=lambda frames: -stacks[frames])
    if not other:
        at = Counter[str]()
        for frames in often:
            at[_place(frames)] += stacks[frames]
        return at.most_common(1)[0][0] if at else ""
    more = {place: part - other.get(place, 0.0) for place, part in shares(stacks).items()}
    most = max(more.values(), default=0.0)
    places = (place for frames in often for place in _places(frames) if more[place] >= _NEARLY * most)
    return next(places, "") if most >= _LEAST_MORE else ""


def stack_at(stacks: Mapping[tuple[str, ...], int], place: str) -> list[str]:
    """Return the frames of the stack most often seen at a place, the innermost first."""
    there = {frames: seen for frames, seen in stacks.items() if place in _places(frames)}
    frames, _ = max(there.items(), key=lambda each: each[1], default=((), 0))
    return list(frames)
