"""References: expected times of operations, from the catalogue or from measurements on this hardware.

Measured references are JSON files under ``<state>/references``, written atomically and never overwritten. Beside them is a file for each host
whose GPUs have a known link (``hardware.py``).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any, ClassVar

from commwatch.wire import crossing
from commwatch.wire.errors import CommwatchError
from commwatch_agent.model.alpha_beta import Curve, Fit, fit, messages
from commwatch_agent.model.bandwidth import BUS_FACTOR
from commwatch_agent.reference.hardware import GpuLink
from commwatch_agent.reference.links import Link, UnknownLink, find

logger = logging.getLogger("commwatch")

_MOST_BYTES = 16 << 20
VERSION = 1
#: Kinds, best first. ``hardware`` is the rated link of known GPUs: a job that computes at the same time need not reach it, so nothing is
#: concluded from it. ``own_best`` is fitted to the job's own fastest operations and does not describe the link.
MEASURED = ("bench", "nccl_tests")
KINDS = (*MEASURED, "catalogue", "hardware", "own_best")
#: Kinds that do not show that a link is too slow.
INCONCLUSIVE = frozenset({"hardware", "own_best"})
#: Backends whose operations on one node go over the links of the GPUs.
_ON_GPUS = frozenset({"nccl", "nccl2", "nccl-lazy"})
_OF_HOST, _MOST_LINK_BYTES = ".link", 100
#: Upper bound of an unknown α; and how many times the latency the whole time must be, so that α is negligible.
_SLOWEST_ALPHA_S, _NEGLIGIBLE = 10e-6, 10
#: Greatest plausible number in a file.
_MOST = 1e300


class BadReference(CommwatchError):
    """A file is no reference, or a reference cannot be written; the message names the file and the reason."""


@dataclass(frozen=True)
class Modelled:
    """A reference that is a curve, for any operation and number of ranks."""

    kind: str
    name: str
    curve: Curve
    #: False where only β is known: expected times exist only where α is negligible.
    alpha_known: bool = True

    def time_s(self, op: str, group_size: int, size_bytes: float) -> float | None:
        """Return the expected time in seconds; ``None`` where it is not known."""
        time = self.curve.time_s(op, group_size, size_bytes)
        if time is None or self.alpha_known:
            return time
        return time if time >= _NEGLIGIBLE * messages(op, group_size) * _SLOWEST_ALPHA_S else None


def catalogued(link: Link) -> Modelled:
    """Return a link of the catalogue as a reference."""
    return Modelled("catalogue", link.key, link.curve(), link.latency_s is not None)


def rated(link: GpuLink, hosts: int) -> Modelled | None:
    """Return the link of a group of all GPUs of some nodes as a reference; ``None``: that between the nodes is not known.

    Over several nodes, a ring goes through all network cards of a node at once. α is left out, because it depends on more than the link.
    """
    inside = find(link.key)
    if hosts == 1:
        return Modelled("hardware", link.key, inside.curve(), alpha_known=False)
    if link.nic is None:
        return None
    across = find(f"{link.gpus} x {link.nic}")
    slower = min(inside, across, key=lambda each: each.bandwidth)
    return Modelled("hardware", slower.key, slower.curve(), alpha_known=False)


@dataclass(frozen=True)
class Measured:
    """Times in seconds by operation and size, measured in one group; kind ``bench`` or ``nccl_tests``."""

    kind: str
    name: str
    #: torch's name of the backend; ``None``: not known.
    backend: str | None
    group_size: int
    #: Names of the hosts its ranks were on; empty: not known.
    hosts: tuple[str, ...]
    #: Unix time.
    made_at: float
    #: Seconds by operation and S in bytes.
    points: Mapping[str, Mapping[int, float]]
    #: The command or file that it comes from.
    source: str

    #: The operation whose curve replaces that of one that was not measured.
    STAND_IN: ClassVar[str] = "all_reduce"

    def time_s(self, op: str, group_size: int, size_bytes: float) -> float | None:
        """Return the expected time in seconds; ``None`` where it is not known.

        For the measured number of ranks, and a size within the measured ones, it is interpolated on logarithmic scales.
        Otherwise it comes from the α-β curve through the operation's points. An operation that was not measured gets the
        curve of all_reduce, as if it used the links alike: an estimate. Sizes below the measured ones have none.
        """
        by = op if self.points.get(op) else self.STAND_IN
        points, fitted = self.points.get(by), self.fits.get(by)
        if not points or size_bytes < min(points):
            return None
        is_measured = size_bytes <= max(points)
        if by == op and group_size == self.group_size and is_measured:
            return _between(points, size_bytes)
        # A curve that does not depend on size cannot be extrapolated to larger sizes.
        if fitted is None or (fitted.curve.beta_s == 0 and not is_measured):
            return None
        return fitted.curve.time_s(op, group_size, size_bytes)

    @cached_property
    def fits(self) -> Mapping[str, Fit]:
        """Curve of each operation with enough points."""
        fits = {op: fit(op, self.group_size, points) for op, points in self.points.items()}
        return {op: fitted for op, fitted in fits.items() if fitted is not None}


Reference = Modelled | Measured


def _between(points: Mapping[int, float], size_bytes: float) -> float:
    """Interpolate on logarithmic scales; ``size_bytes`` must be within the sizes."""
    sizes = sorted(points)
    at = bisect_left(sizes, size_bytes)
    right = sizes[at]
    if right == size_bytes:
        return points[right]
    left = sizes[at - 1]
    share = log(size_bytes / left) / log(right / left)
    return exp(log(points[left]) * (1 - share) + log(points[right]) * share)


# -- files ------------------------------------------------------------------------------------


def directory(state: Path) -> Path:
    """Return the directory of references in a state directory."""
    return state / "references"


def save(where: Path, reference: Measured) -> Path:
    """Write a reference to the directory ``where`` under a new name; return its path.

    Raises:
        BadReference: it cannot be written.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", f"{reference.kind} {reference.name}".lower()).strip("-")[:100]
    text = json.dumps({"version": VERSION, **asdict(reference)}, indent=1)
    hidden = where / f".{os.getpid()}-{secrets.token_hex(4)}"
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        hidden.write_text(text, encoding="utf-8")
        try:
            number = 1
            while True:
                path = where / (f"{slug}.json" if number == 1 else f"{slug}-{number}.json")
                try:
                    os.link(hidden, path)  # fails if the name exists, which a rename does not
                except FileExistsError:
                    number += 1
                else:
                    return path
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        raise BadReference(f"cannot store a reference: {error.strerror or error} ({error.filename or where})") from None


def save_link(where: Path, host: str, link: GpuLink | None) -> None:
    """Write the link of a host's GPUs to the directory ``where``, or remove it if it is not known.

    Raises:
        BadReference: it cannot be written.
    """
    path = where / (re.sub(r"[^A-Za-z0-9._-]+", "-", host).lstrip(".")[:100] + _OF_HOST)
    hidden = where / f".{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if link is None:
            path.unlink(missing_ok=True)
            return
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        own_port = "" if link.nic is None else f", each with {link.nic}"
        hidden.write_text(f"{link.gpus} x {link.key}{own_port}\n", encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise BadReference(
            f"cannot store the link of the GPUs: {error.strerror or error} ({error.filename or where})"
        ) from None


def load_link(path: Path) -> GpuLink:
    """Read what ``save_link`` wrote; raise ``BadReference`` if the file has something else, or cannot be read."""
    try:
        found = crossing.read(path, _MOST_LINK_BYTES, crossing.ANYBODY).decode(errors="replace")
        number, key, nic = re.fullmatch(r"(\d{1,4}) x (\S+?)(?:, each with (\S+))?\n", found).groups()  # type: ignore[union-attr]
        return GpuLink(find(key).key, int(number), None if nic is None else find(nic).key)
    except OSError as error:
        raise BadReference(f"{path}: {error.strerror}") from None
    except (AttributeError, UnknownLink):
        raise BadReference(f"{path}: damaged: not the link of a host's GPUs") from None


def load(path: Path) -> Measured:
    """Read a reference.

    Raises:
        BadReference: the file is no reference, or cannot be read.
    """
    try:
        found = json.loads(crossing.read(path, _MOST_BYTES, crossing.ANYBODY))
    except OSError as error:
        raise BadReference(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadReference(f"{path}: damaged: not JSON") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        raise BadReference(f"{path}: not a reference of version {VERSION} (version: {version!r})")
    checks = {
        "kind": found.get("kind") in MEASURED,
        "name": isinstance(found.get("name"), str),
        "backend": found.get("backend") is None or isinstance(found["backend"], str),
        "group_size": _is_number(found.get("group_size")) and isinstance(found["group_size"], int) and found["group_size"] > 1,
        "hosts": isinstance(found.get("hosts"), list) and all(isinstance(host, str) for host in found["hosts"]),
        "made_at": _is_number(found.get("made_at")),
        "points": isinstance(found.get("points"), dict) and len(found["points"]) > 0,
        "source": isinstance(found.get("source"), str),
    }  # fmt: skip
    wrong = [name for name, good in checks.items() if not good]
    if wrong:
        raise BadReference(f"{path}: damaged: {', '.join(wrong)}")
    known = {name: found[name] for name in checks}
    points = {op: _points(path, op, found["points"][op]) for op in found["points"]}
    return Measured(**{**known, "hosts": tuple(found["hosts"]), "points": points})


def _points(path: Path, op: str, found: Any) -> dict[int, float]:
    if op not in BUS_FACTOR or not isinstance(found, dict) or not found:
        raise BadReference(f"{path}: damaged: points of {op}")
    good = {int(size): time for size, time in found.items() if re.fullmatch(r"\d{1,18}", size) and _is_number(time)}
    if len(good) < len(found) or min(good) < 1 or min(good.values()) <= 0:
        raise BadReference(f"{path}: damaged: points of {op}")
    return good


def _is_number(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and -_MOST <= value <= _MOST


# -- which one --------------------------------------------------------------------------------


@dataclass
class References:
    """All references, and the choice among them for a group and operation."""

    where: Path
    #: Group label, or ``*`` for all others, to text for ``links.find``: the validated setting ``links``.
    links: Mapping[str, str] = field(default_factory=dict)
    #: References by path, and error texts of the damaged files.
    measured: Mapping[Path, Measured] = field(default_factory=dict, init=False)
    damaged: Mapping[Path, str] = field(default_factory=dict, init=False)
    #: The link of the GPUs of each host, by path.
    gpu_links: Mapping[Path, GpuLink] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the directory again if it has changed; skip damaged files and log each once."""
        seen = _listed(self.where)
        if seen == self._seen:
            return
        measured: dict[Path, Measured] = {}
        gpu_links: dict[Path, GpuLink] = {}
        damaged: dict[Path, str] = {}
        for path, state in seen.items():
            unchanged = self._seen.get(path) == state
            if unchanged and path in self.damaged:
                damaged[path] = self.damaged[path]
                continue
            try:
                if path.suffix == _OF_HOST:
                    gpu_links[path] = self.gpu_links[path] if unchanged else load_link(path)
                else:
                    measured[path] = self.measured[path] if unchanged else load(path)
            except BadReference as error:
                damaged[path] = str(error)
                logger.warning("reference skipped: %s", error)
        self._seen, self.measured, self.damaged, self.gpu_links = seen, measured, damaged, gpu_links

    def curves(self) -> dict[str, Curve]:
        """Return the curves of all_reduce of the measured references, by the names of their files without ``.json``."""
        self.refresh()
        fits = {path.stem: one.fits.get(Measured.STAND_IN) for path, one in self.measured.items()}
        return {name: fitted.curve for name, fitted in fits.items() if fitted is not None}

    def best(  # noqa: PLR0917 - called as ``efficiency.Find``
        self,
        group: str,
        backend: str | None,
        group_size: int,
        hosts: int | None = None,
        op: str | None = None,
        here: int = 0,
    ) -> Reference | None:
        """Return the reference for the operations of a group: ``bench``, else ``nccl_tests``, else the catalogue, else the GPUs' rated link.

        A measured reference must have the group's backend, and be of one host or of several as the group is, where both are known.
        Among these the nearest number of ranks wins, then the newest.

        Args:
            group: label of the group.
            backend: torch's name of its backend; ``None``: not known.
            group_size: ranks in the group.
            hosts: on how many hosts they are; ``None``: not known.
            op: references that measured this operation come first, whatever their kind; those without any estimate of it
                are left out. ``None``: any operation.
            here: most of its ranks that are known to be on one host.
        """
        if group_size < 2:
            return None

        def order(one: Measured) -> tuple[bool, int, float, float]:
            estimated = op is not None and op not in one.points
            return estimated, MEASURED.index(one.kind), abs(log(one.group_size / group_size)), -one.made_at

        fitting = [one for one in self.measured.values() if _fits(one, backend, hosts) and _knows(one, op)]
        if fitting:
            return min(fitting, key=order)
        key = self.links.get(group) or self.links.get("*")
        if key is not None:
            return catalogued(find(key))
        return self._of_gpus(group_size, hosts, here) if backend in _ON_GPUS and hosts is not None else None

    def _of_gpus(self, group_size: int, hosts: int, here: int) -> Modelled | None:
        """Return the rated link of a group of all GPUs of its nodes; ``None``: not known, or hosts that share the directory differ.

        Fewer GPUs may have only some of the links between them.
        """
        known = set(self.gpu_links.values())
        link = known.pop() if len(known) == 1 else None
        return rated(link, hosts) if link is not None and link.gpus == here and group_size % here == 0 else None


def _listed(where: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the files, each with its inode, mtime in ns and size in bytes, which change with it."""
    try:
        with os.scandir(where) as entries:
            found = [(Path(entry.path), entry.stat()) for entry in entries if _is_ours(entry.name)]
    except OSError:
        return {}
    return {path: (about.st_ino, about.st_mtime_ns, about.st_size) for path, about in sorted(found)}


def _is_ours(name: str) -> bool:
    return name.endswith((".json", _OF_HOST)) and not name.startswith(".")


def _fits(one: Measured, backend: str | None, hosts: int | None) -> bool:
    if backend is not None and one.backend is not None and backend != one.backend:
        return False
    return hosts is None or not one.hosts or (hosts > 1) == (len(one.hosts) > 1)


def _knows(one: Measured, op: str | None) -> bool:
    return op is None or op in one.points or Measured.STAND_IN in one.fits
