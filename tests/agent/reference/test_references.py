"""References: expected times from the catalogue and from measurements, the files they lie in, and which of them is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.reference.hardware import GpuLink
from commwatch_agent.reference.links import find
from commwatch_agent.reference.references import (
    BadReference,
    Measured,
    References,
    catalogued,
    directory,
    load,
    load_link,
    save,
    save_link,
)
from tests.helpers import examples

CURVE = Curve(10e-6, 1e-10)
SIZES = [1024 * 4**k for k in range(6)]


def times(op: str, group_size: int = 4, curve: Curve = CURVE) -> dict[int, float]:
    """Seconds by size that a curve gives."""
    return {size: time for size in SIZES if (time := curve.time_s(op, group_size, size)) is not None}


def measured(**more: Any) -> Measured:
    """A reference measured among four ranks on one host."""
    base = Measured(
        "bench",
        "gloo, 4 ranks",
        "gloo",
        4,
        ("node1",),
        1_700_000_000.0,
        {"all_reduce": times("all_reduce")},
        "torchrun",
    )
    return replace(base, **more)


# -- expected times -----------------------------------------------------------------------------


def test_catalogue() -> None:
    """A link of the catalogue gives α of each message and β of each byte, by hand: 2(n-1)α + 2(n-1)/n S/B."""
    link = find("nvlink4")
    expected = 14 * 1e-6 + 14 / 8 * 1e9 / 450e9
    assert catalogued(link).time_s("all_reduce", 8, 1e9) == pytest.approx(expected)
    assert (catalogued(link).kind, catalogued(link).name) == ("catalogue", "nvlink4")
    assert catalogued(link).time_s("barrier", 8, 0) is None


def test_unknown_latency() -> None:
    """Where α is not known, only operations have an expected time that it would not matter to."""
    reference = catalogued(find("if-mi300x"))
    assert reference.time_s("all_reduce", 8, 1_000_000) is None
    assert reference.time_s("all_reduce", 8, 1_000_000_000) == pytest.approx(14 / 8 * 1e9 / 448e9)


@pytest.mark.parametrize("size", SIZES)
def test_measured_sizes(size: int) -> None:
    """At a size that was measured the expected time is the measured one, even off any curve."""
    points = {**times("all_reduce"), size: 0.5}
    assert measured(points={"all_reduce": points}).time_s("all_reduce", 4, size) == 0.5


def test_between_sizes() -> None:
    """Between two sizes it goes straight from one to the other on logarithmic scales."""
    reference = measured(points={"all_reduce": {1000: 1e-3, 4000: 4e-3, 100_000: 5.0}})
    assert reference.time_s("all_reduce", 4, 2000) == pytest.approx(2e-3)
    assert reference.time_s("all_reduce", 4, 20_000) == pytest.approx((4e-3 * 5.0) ** 0.5)


@examples(100)
@given(st.floats(SIZES[0], SIZES[-1]))
def test_between_neighbours(size: float) -> None:
    """Whatever the size, the expected time is not outside those of its neighbours."""
    points = times("all_reduce")
    time = measured().time_s("all_reduce", 4, size)
    assert time is not None
    below, above = max(s for s in SIZES if s <= size), min(s for s in SIZES if s >= size)
    assert points[below] * (1 - 1e-9) <= time <= points[above] * (1 + 1e-9)


@pytest.mark.parametrize(("group_size", "size"), [(4, 1 << 28), (8, 4096), (2, 1 << 28)])
def test_elsewhere_by_the_curve(group_size: int, size: int) -> None:
    """Larger sizes and other numbers of ranks go by the curve through the points."""
    assert measured().time_s("all_reduce", group_size, size) == pytest.approx(
        CURVE.time_s("all_reduce", group_size, size), rel=1e-3
    )


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("size", [16, SIZES[0] - 1])
def test_sizes_below_the_measured_ones(op: str, group_size: int, size: int) -> None:
    """Sizes below all measurements have no expected time, also of an operation that only the curve of all_reduce gives one."""
    assert measured().time_s(op, group_size, size) is None


def test_size_made_no_difference() -> None:
    """A flat curve shows nothing of sizes above those measured."""
    flat = measured(points={"all_reduce": dict.fromkeys(SIZES, 1e-3)})
    assert flat.time_s("all_reduce", 2, SIZES[0]) == pytest.approx(1e-3 / 3, rel=0.1)
    assert flat.time_s("all_reduce", 4, SIZES[-1] * 2) is None


def test_operation_that_was_not_measured() -> None:
    """The expected time follows the curve of all_reduce; without one there is no expected time."""
    assert measured().time_s("all_gather", 4, 1 << 20) == pytest.approx(
        CURVE.time_s("all_gather", 4, 1 << 20), rel=1e-3
    )
    assert measured(points={"broadcast": times("broadcast")}).time_s("all_gather", 4, 1 << 20) is None


def test_too_little_for_a_curve() -> None:
    """Two sizes give an expected time between them, and none elsewhere; a measured operation never uses another one's curve."""
    few = measured(points={"broadcast": {1024: 1e-3, 4096: 2e-3}, "all_reduce": times("all_reduce")})
    assert few.time_s("broadcast", 4, 2048) is not None
    assert few.time_s("broadcast", 4, 8192) is None
    assert few.time_s("broadcast", 8, 2048) is None


# -- files --------------------------------------------------------------------------------------


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    """A reference is read as it was written; no other user may read it, and nothing else is left in the directory."""
    where = directory(tmp_path)
    path = save(where, measured())
    assert load(path) == measured()
    assert list(where.iterdir()) == [path]
    assert where.stat().st_mode & 0o077 == 0


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """References of one name lie side by side."""
    paths = [save(tmp_path, measured(made_at=float(n))) for n in range(3)]
    assert len(set(paths)) == 3
    assert [load(path).made_at for path in paths] == [0.0, 1.0, 2.0]


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """If a reference cannot be stored, the error names the place."""
    (tmp_path / "references").write_text("a file\n")
    with pytest.raises(BadReference, match="references"):
        save(tmp_path / "references", measured())


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda whole: {name: value for name, value in whole.items() if name != key}


def _with(**more: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda whole: {**whole, **more}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        *(
            (_without(key), key)
            for key in ("version", "kind", "name", "group_size", "hosts", "made_at", "points", "source")
        ),
        (_with(version=2), "version: 2"),
        (_with(kind="own_best"), "kind"),
        (_with(backend=3), "backend"),
        (_with(group_size=1), "group_size"),
        (_with(group_size=2.5), "group_size"),
        (_with(group_size=True), "group_size"),
        (_with(hosts="node1"), "hosts"),
        (_with(made_at="now"), "made_at"),
        (_with(made_at=10**400), "made_at"),
        (_with(points={}), "points"),
        (_with(points={"barrier": {"8": 1}}), "barrier"),
        (_with(points={"all_reduce": {}}), "all_reduce"),
        (_with(points={"all_reduce": {"8": 0}}), "all_reduce"),
        (_with(points={"all_reduce": {"0": 1}}), "all_reduce"),
        (_with(points={"all_reduce": {"-8": 1}}), "all_reduce"),
        (_with(points={"all_reduce": {"8": "1"}}), "all_reduce"),
        (lambda _: [], "version"),
    ],
)
def test_damaged_file(tmp_path: Path, damage: Callable[[dict[str, Any]], Any], named: str) -> None:
    """A damaged file is named, with what is wrong in it."""
    path = save(tmp_path, measured())
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(BadReference) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000, '{"version": NaN}'])
def test_file_that_is_no_json(tmp_path: Path, text: str) -> None:
    """What is not JSON is named."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadReference, match=r"bad\.json"):
        load(path)


# -- which one ----------------------------------------------------------------------------------


def test_order_of_kinds(tmp_path: Path) -> None:
    """bench comes before nccl_tests, that before the catalogue; a group's own link before that of all; without any there is none."""
    links = {"dp": "nvlink4", "*": "ib-ndr"}
    references = References(tmp_path, links)

    def best(group: str = "dp") -> tuple[str, str] | None:
        references.refresh()
        found = references.best(group, "gloo", 4)
        return None if found is None else (found.kind, found.name)

    assert best() == ("catalogue", "nvlink4")
    assert best("tp") == ("catalogue", "ib-ndr")
    assert References(tmp_path).best("dp", "gloo", 4) is None
    save(tmp_path, measured(kind="nccl_tests", backend=None, name="b"))
    assert best() == ("nccl_tests", "b")
    save(tmp_path, measured(name="c"))
    assert best() == best("tp") == ("bench", "c")
    assert references.best("dp", "gloo", 1) is None


def test_backend(tmp_path: Path) -> None:
    """What was measured on another backend does not count; where one of the two is not known, it does."""
    save(tmp_path, measured(name="gloo"))
    references = References(tmp_path)
    assert references.best("dp", "nccl", 4) is None
    assert references.best("dp", None, 4) == measured(name="gloo")
    save(tmp_path, measured(name="any", backend=None))
    references.refresh()
    assert references.best("dp", "nccl", 4) == measured(name="any", backend=None)


def test_nearest_then_newest(tmp_path: Path) -> None:
    """The nearest number of ranks wins, as a ratio, and among equals the newest."""
    for name, group_size, made_at in (("old", 4, 1.0), ("new", 4, 2.0), ("two", 2, 3.0), ("many", 64, 9.0)):
        save(tmp_path, measured(name=name, group_size=group_size, made_at=made_at))
    references = References(tmp_path)
    chosen = {
        n: found.name for n in (2, 3, 4, 8, 15, 17, 1024) if (found := references.best("dp", "gloo", n)) is not None
    }
    assert chosen == {2: "two", 3: "new", 4: "new", 8: "new", 15: "new", 17: "many", 1024: "many"}


def test_by_operation(tmp_path: Path) -> None:
    """For an operation, a reference that measured it comes before one that estimates it; one without it does not count."""
    save(tmp_path, measured(name="new", made_at=9.0))
    save(tmp_path, measured(name="old", made_at=1.0, points={"all_gather": times("all_gather")}))
    save(tmp_path, measured(name="other", kind="nccl_tests", points={"broadcast": times("broadcast")}))
    references = References(tmp_path, {"*": "nvlink4"})

    def best(op: str | None, hosts: int | None = None) -> str | None:
        found = references.best("dp", "gloo", 4, hosts, op)
        return None if found is None else found.name

    assert best(None) == best("all_reduce") == best("scatter") == "new"
    assert best("all_gather") == "old"
    assert best("broadcast") == "other"
    next(tmp_path.glob("*new*")).unlink()
    references.refresh()
    assert (best("broadcast"), best("scatter")) == ("other", "nvlink4")


def test_hosts(tmp_path: Path) -> None:
    """What was measured on one host does not count for a group on several, where both are known."""
    save(tmp_path, measured())
    references = References(tmp_path)
    assert references.best("dp", "gloo", 4, hosts=2) is None
    assert references.best("dp", "gloo", 4, hosts=1) == references.best("dp", "gloo", 4) == measured()
    save(tmp_path, measured(hosts=()))
    references.refresh()
    assert references.best("dp", "gloo", 4, hosts=2) == measured(hosts=())


def test_changes_are_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New, changed and removed files take effect at the next read; a damaged one is logged once and the others remain."""
    references = References(tmp_path / "none")
    assert (dict(references.measured), dict(references.damaged)) == ({}, {})
    references = References(tmp_path)
    good, bad = save(tmp_path, measured(name="good")), save(tmp_path, measured(name="bad"))
    references.refresh()
    assert set(references.measured) == {good, bad}
    before = references.measured[good]
    bad.write_text("torn")
    for _ in range(3):
        references.refresh()
    assert dict(references.measured) == {good: measured(name="good")}
    assert references.measured[good] is before  # not read again
    assert set(references.damaged) == {bad}
    assert caplog.text.count(str(bad)) == 1
    replacement = save(tmp_path, measured(name="good", made_at=7.0))
    replacement.replace(good)
    bad.unlink()
    (tmp_path / ".hidden.json").write_text("not ours")
    (tmp_path / "notes.txt").write_text("not ours")
    references.refresh()
    assert dict(references.measured) == {good: measured(name="good", made_at=7.0)}
    assert not references.damaged


# -- known GPUs -----------------------------------------------------------------------------------

NVLINK = GpuLink("nvlink4", 8)


def of_gpus(where: References, **other: Any) -> tuple[str, str] | None:
    """Kind and name of the reference of a group of eight GPUs on one node, but for what is given."""
    about = {"backend": "nccl", "group_size": 8, "hosts": 1, "here": 8, **other}
    found = where.best("dp", op="all_reduce", **about)
    return None if found is None else (found.kind, found.name)


def test_rated_link(tmp_path: Path) -> None:
    """A group of all GPUs of one node has their rated link, on a backend for GPUs; anything measured or set comes first."""
    save_link(tmp_path, "node1", NVLINK)
    references = References(tmp_path)
    assert of_gpus(references) == ("hardware", "nvlink4")
    others: list[dict[str, Any]] = [
        {"backend": "gloo"},
        {"backend": None},
        {"group_size": 4, "here": 4},
        {"group_size": 16, "hosts": 2},
        {"hosts": None},
    ]
    assert [of_gpus(references, **other) for other in others] == [None] * len(others)
    assert of_gpus(References(tmp_path, {"*": "nvlink3"})) == ("catalogue", "nvlink3")
    save(tmp_path, measured(backend="nccl"))
    assert of_gpus(References(tmp_path)) == ("bench", "gloo, 4 ranks")


def test_rated_link_across_nodes(tmp_path: Path) -> None:
    """A group of all GPUs of several nodes has the rated speed of all their network cards, or of the GPUs' own link if that is less."""
    for nic, name in (("ib-ndr", "8 x ib-ndr"), ("ib-xdr", "nvlink4")):
        save_link(tmp_path, "node1", NVLINK._replace(nic=nic))
        references = References(tmp_path)
        assert of_gpus(references, group_size=16, hosts=2) == ("hardware", name)
        assert of_gpus(references) == ("hardware", "nvlink4")
        assert of_gpus(references, group_size=16, hosts=2, here=4) is None
        assert of_gpus(references, group_size=12, hosts=2) is None


def test_hosts_that_share_a_directory(tmp_path: Path) -> None:
    """Where hosts with different GPUs share the directory, none has a rated link; a host whose GPUs are not known any more has none."""
    references = References(tmp_path)

    def known(host: str, link: GpuLink | None) -> bool:
        save_link(tmp_path, host, link)
        references.refresh()
        return of_gpus(references) is not None

    assert known("node1", NVLINK)
    assert known("../node2", NVLINK)
    assert not known("../node2", GpuLink("nvlink3", 8))
    assert known("../node2", None)
    assert not known("node1", None)
    assert not known("node1", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "8 x nvlink4", "8 x nvlink4, each with x\n", "8 x nvlink99\n", "x nvlink4\n", "8 x nvlink4\n" * 20, "\xff\n"],
)
def test_damaged_link(tmp_path: Path, text: str) -> None:
    """A damaged file is skipped and named."""
    path = tmp_path / "node1.link"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadReference, match=re.escape(str(path))):
        load_link(path)
    references = References(tmp_path)
    assert list(references.damaged) == [path]
    assert of_gpus(references) is None


def test_link_that_cannot_be_written(tmp_path: Path) -> None:
    """A directory that cannot be made is one error, which names it."""
    (tmp_path / "file").touch()
    with pytest.raises(BadReference, match=str(tmp_path / "file")):
        save_link(tmp_path / "file" / "references", "node1", NVLINK)
