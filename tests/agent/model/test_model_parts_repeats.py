"""What steps communicate more than once, from records made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commwatch.wire import events as ev
from commwatch_agent.model.model_parts.repeats import Repeat, repeats_of
from commwatch_agent.model.model_parts.tables import PartTable, table_of
from tests.agent.model.test_model_parts import DTYPES, FLOAT, PASS, TABLE, records
from tests.helpers import MS, mark, operation

REDUCE, GATHER, SCATTER = ((0, ev.OP_CODE[op]) for op in ("all_reduce", "all_gather", "reduce_scatter"))
#: The letters of gathers and reductions of two units, and their numbers of elements.
UNITS = {"A": ("all_gather", 20), "a": ("reduce_scatter", 20), "B": ("all_gather", 60), "b": ("reduce_scatter", 60)}


#: Operations of a step with their elements, and perhaps flags.
Step = Sequence[tuple[str, int] | tuple[str, int, int]]


def units(order: str) -> PartTable:
    """The table of a pass of FSDP2 with this order."""
    names = {"A": 0, "a": 0, "B": 1, "b": 1}
    parts = [[0, *UNITS[each], [names[each]] * order.count(each)] for each in sorted(set(order))]
    return table_of({"parts": 1, "since": 0, "names": ["unit 0", "unit 1"], "order": parts})


def job(*steps: Step, marks: tuple[int, ...] = (0,), tail_ms: int = 0) -> list[ev.Record]:
    """Steps of 100 ms with these operations and elements, of optimizers that take turns, each of which begins ``tail_ms`` before its mark."""
    found = [mark(0, 100 * MS, optimizer=marks[-1])]
    for number, step in enumerate(steps, start=1):
        at = [(number * 100 + n + 1) * MS for n in range(len(step))]
        found += [
            operation(op, start_ns=begin, end_ns=begin + MS, size=4 * each, dtype=FLOAT, flags=sum(flags))
            for begin, (op, each, *flags) in zip(at, step, strict=True)
        ]
        end = (number + 1) * 100 * MS
        found.append(mark(number, end, began_ns=end - tail_ms * MS, optimizer=marks[number % len(marks)]))
    return records(found)


def buckets(passes: int) -> Step:
    return [("all_reduce", each) for each in PASS] * passes


def letters(order: str) -> Step:
    return [UNITS[each] for each in order]


def test_backward_passes() -> None:
    """Steps that exchange all buckets four times have four passes; of steps with other numbers of passes the smallest counts."""
    assert repeats_of(job(*[buckets(4)] * 3), [TABLE], DTYPES) == {REDUCE: Repeat(4, 0.75)}
    assert repeats_of(job(buckets(4), buckets(2), buckets(4)), [TABLE], DTYPES) == {REDUCE: Repeat(2, 0.5)}
    assert repeats_of(job(*[buckets(1)] * 3), [TABLE], DTYPES) == {}


def test_other_operations_do_not_repeat() -> None:
    """Of the bytes of a kind, only those of named parts repeat."""
    step = [*buckets(2), ("all_reduce", 100)]
    assert repeats_of(job(*[step] * 3), [TABLE], DTYPES) == {REDUCE: Repeat(2, 0.25)}


@pytest.mark.parametrize(
    ("records_", "tables"),
    [
        (job(*[buckets(2)] * 2), [TABLE]),  # too few steps
        (job(*[buckets(2)] * 4, marks=(0, 1)), [TABLE]),  # two optimizers, as of a GAN
        (job(*[buckets(2)] * 4, marks=(-1,)), [TABLE]),  # commwatch.step()
        (job(*[buckets(2)] * 4, tail_ms=99), [TABLE]),  # the optimizer makes the passes, as L-BFGS
        (job(*[buckets(2)] * 4), [TABLE, TABLE._replace(since_ns=1)]),  # two models with equal parts
        (job(*[[*buckets(2), ("all_reduce", 20)]] * 4), [TABLE]),  # not a whole number of passes
        (job(buckets(2), buckets(1), buckets(2), buckets(2)), [TABLE]),
        ([], [TABLE]),
        (job(*[buckets(2)] * 4), []),
    ],
)
def test_not_certain(records_: list[ev.Record], tables: list[PartTable]) -> None:
    """Without certainty about the passes of each optimizer step, nothing repeats."""
    assert repeats_of(records_, tables, DTYPES) == {}


def test_layers_of_equal_size() -> None:
    """Buckets of equal size are no passes."""
    equal = table_of({"parts": 1, "since": 0, "names": list("abcd"), "order": [[0, "all_reduce", 20, [0, 1, 2, 3]]]})
    assert repeats_of(job(*[[("all_reduce", 20)] * 4] * 3), [equal], DTYPES) == {}


def test_operation_of_the_size_of_the_bucket() -> None:
    """An operation of the user's that has the size of the only bucket is no pass."""
    bucket = table_of({"parts": 1, "since": 0, "names": ["bucket 0: a"], "order": [[0, "all_reduce", 20, [0]]]})
    step: Step = [("all_reduce", 20, ev.ASYNC), ("all_reduce", 20)]
    assert repeats_of(job(*[step] * 3), [bucket], DTYPES) == {}
    assert repeats_of(job(*[[step[0]] * 2] * 3), [bucket], DTYPES) == {REDUCE: Repeat(2, 0.5)}


def test_units_gathered_again() -> None:
    """A unit that is gathered for the forward and for the backward pass is gathered again; one that keeps its parameters is not."""
    order = "ABBbAa"
    assert repeats_of(job(*[letters(order)] * 3), [units(order)], DTYPES) == {GATHER: Repeat(1, 0.5)}
    order = "ABBba"
    assert repeats_of(job(*[letters(order)] * 3), [units(order)], DTYPES) == {GATHER: Repeat(1, 60 / 140)}
    order = "ABba"
    assert repeats_of(job(*[letters(order)] * 3), [units(order)], DTYPES) == {}


def test_passes_of_units() -> None:
    """Units have passes of their own where they are gathered twice for each reduction; not where a model is called twice before its backward pass."""
    found = repeats_of(job(*[letters("ABBba" * 2)] * 3), [units("ABBba" * 2)], DTYPES)
    assert found == {GATHER: Repeat(1, 60 / 140), SCATTER: Repeat(2, 0.5)}
    twice = "ABABBbAaBbAa"
    assert repeats_of(job(*[letters(twice)] * 3), [units(twice)], DTYPES) == {}
    unknown = "ABba" * 2
    assert repeats_of(job(*[letters(unknown)] * 3), [units(unknown)], DTYPES) == {}
