"""The part of a model that a collective carries, from records made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.model.model_parts.joining import parts_of
from commwatch_agent.model.model_parts.tables import PartTable, table_from, table_of, text_of
from commwatch_agent.model.names_file import Names
from tests.helpers import MS, mark, operation

FLOAT = 1
DTYPES = {FLOAT: "float32", 2: "float16", 3: "quint4x2"}
#: A pass of DDP: a bucket of 10 elements between two of 20.
ENTRY: dict[str, Any] = {
    "parts": 1,
    "since": 0,
    "names": ["first", "middle", "last"],
    "order": [[0, "all_reduce", 20, [0, 2]], [0, "all_reduce", 10, [1]]],
}
TABLE = table_of(ENTRY)
PASS = (20, 10, 20)


def reduced(at_ms: int, elements: int, **other: Any) -> tuple[int, ...]:
    """An all_reduce of float32, launched at this time."""
    fields = {"op": "all_reduce", "size": 4 * elements, "dtype": FLOAT, **other}
    return operation(start_ns=at_ms * MS, end_ns=(at_ms + 1) * MS, **fields)


def ring(*steps: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Steps, each ended by a mark, 100 ms long; the first mark comes before them."""
    found = [mark(0, 100 * MS)]
    for number, step in enumerate(steps, start=1):
        found += [*step, mark(number, (number + 1) * 100 * MS)]
    return found


def step(number: int, *elements: int, **other: Any) -> list[tuple[int, ...]]:
    """The all_reduces of step ``number``, in their order."""
    return [reduced(number * 100 + 2 * n + 1, each, **other) for n, each in enumerate(elements)]


def records(fields: list[tuple[int, ...]], first: int = 1) -> list[ev.Record]:
    return [ev.Record._make((first + n, *each, first + n)) for n, each in enumerate(fields)]


def named(fields: list[tuple[int, ...]], *tables: PartTable, first: int = 7) -> list[str | None]:
    """The parts of the operations, in the order of the records."""
    every = records(fields, first)
    found = parts_of(every, tables or (TABLE,), DTYPES)
    return [found.get(each.stamp) for each in every if each.op != ev.STEP_MARK]


def test_place_in_the_step() -> None:
    """Parts of equal size are distinguished by their place in the step, in whichever order they end."""
    one, two = step(1, *PASS), step(2, *PASS)
    assert named(ring(one, two)) == ["first", "middle", "last"] * 2
    assert named(ring(one[::-1])) == ["last", "middle", "first"]


def test_several_passes() -> None:
    """A step with several passes, whose gradients are not accumulated, has the names of each pass; one without a pass has none."""
    assert named(ring(step(1, *PASS, *PASS), step(2))) == ["first", "middle", "last"] * 2


@pytest.mark.parametrize("elements", [(20, 10), (20, 20), (20, 10, 20, 20), (20, 10, 20, 10), (10,), (*PASS, 20, 10)])
def test_not_certain(elements: tuple[int, ...]) -> None:
    """In a step that is not a whole number of passes nothing is named: a part is missing, or another collective has its size."""
    assert named(ring(step(1, *elements), step(2, *PASS))) == [None] * len(elements) + ["first", "middle", "last"]


def test_others_between() -> None:
    """Collectives of other sizes, groups, operations and unknown dtypes change nothing and have no names."""
    others = [
        reduced(150, 21),
        reduced(152, 20, group=1),
        reduced(154, 20, op="all_gather"),
        reduced(156, 20, dtype=3),
        reduced(158, 20, dtype=9),
    ]
    assert named(ring([*step(1, *PASS), *others])) == ["first", "middle", "last", *[None] * 5]


def test_other_dtype() -> None:
    """A part has its name if its gradients are compressed: its elements count, not its bytes."""
    compressed = [reduced(101 + n, each // 2, dtype=2) for n, each in enumerate(PASS)]
    assert named(ring(compressed)) == ["first", "middle", "last"]


def test_incomplete_steps() -> None:
    """The step before the first mark and the one after the last have no names, but the first one of a ring has."""
    fields = ring(step(1, *PASS), step(2, *PASS))[1:-1]
    assert named(fields) == [None] * 6
    found = parts_of(records(fields), (TABLE,), DTYPES, whole=True)
    assert [found.get(stamp) for stamp in range(1, 8)] == ["first", "middle", "last", None, None, None, None]


def test_lost_records() -> None:
    """A step of which records are missing has no names, nor has one whose operations were only counted."""
    every = records(ring(step(1, *PASS), step(2, *PASS), step(3, *PASS)))
    without = [each for each in every if each.stamp != 7]
    found = parts_of(without, (TABLE,), DTYPES)
    assert sorted(found) == [2, 3, 4, 10, 11, 12]
    counted = [each._replace(timing=ev.COUNTED) if each.stamp == 3 else each for each in every]
    assert sorted(parts_of(counted, (TABLE,), DTYPES)) == [6, 7, 8, 10, 11, 12]


def test_since() -> None:
    """Operations that were launched before a table was valid have no names."""
    late = TABLE._replace(since_ns=200 * MS)
    assert named(ring(step(1, *PASS), step(2, *PASS)), late) == [None] * 3 + ["first", "middle", "last"]


def test_two_tables() -> None:
    """Where two tables name an operation, it has a name if they agree."""
    other = TABLE._replace(names=("first", "second", "last"))
    assert named(ring(step(1, *PASS)), TABLE, other) == ["first", None, "last"]
    assert named(ring(step(1, *PASS)), TABLE, TABLE) == ["first", "middle", "last"]


def test_two_models_in_one_group() -> None:
    """Two models whose parts have one size are not told apart, so that neither is named; parts of other sizes do not matter."""
    other = table_of({**ENTRY, "names": ["a", "b"], "order": [[0, "all_reduce", 10, [0]], [0, "all_reduce", 5, [1]]]})
    assert named(ring(step(1, *PASS, 10, 5)), TABLE, other) == [None] * 5
    apart = table_of({**ENTRY, "names": ["a", "b"], "order": [[0, "all_reduce", 7, [0]], [0, "all_reduce", 5, [1]]]})
    assert named(ring(step(1, *PASS, 7, 5)), TABLE, apart) == ["first", "middle", "last", "a", "b"]


def test_stored() -> None:
    """A table comes out of the history as it went in."""
    assert table_from(text_of(TABLE)) == TABLE


WRONG: list[dict[str, Any]] = [
    {"since": -1},
    {"since": 1 << 63},
    {"names": None},
    {"order": [[0, "all_reduce", 20, [3]]]},
    {"order": [[0, "all_reduce", 20, []]]},
    {"order": [[0, "c10d::unknown", 20, [0]]]},
    {"order": [[0xFFFF, "all_reduce", 20, [0]]]},
    {"order": [[0, "all_reduce", 0, [0]]]},
    {"order": [[0, "all_reduce", 1 << 63, [0]]]},
    {"order": [[0, "all_reduce", 20, [0] * 20_000]]},
    {"order": [["x"]]},
    {"parts": 1 << 20},
    {"parts": -1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_damaged(wrong: dict[str, Any]) -> None:
    """A damaged table is skipped, and those after it are read."""
    names = Names()
    names.learn([{**ENTRY, **wrong}])
    assert not names.parts
    learned = names.learn([ENTRY])
    assert names.parts == {1: TABLE}
    assert learned.codes == [("parts", 1, text_of(TABLE))]
    assert not names.learn([ENTRY]).codes


@given(st.lists(st.sampled_from([20, 10, 7]), max_size=12))
def test_never_a_wrong_size(elements: list[int]) -> None:
    """Whatever a step has, no operation has the name of a part of another size."""
    sizes = {"first": 20, "middle": 10, "last": 20}
    found = named(ring(step(1, *elements)))
    assert all(name is None or sizes[name] == size for name, size in zip(found, elements, strict=True))
