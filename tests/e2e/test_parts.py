"""Operations have the names that PyTorch gives what they carry: the buckets of DDP and the units of FSDP2 (tests/e2e/jobs/parts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.history.operations import Operation
from tests.e2e.torchjob import digest, results, run_job
from tests.helpers import BOTH_HOOKS

#: The job's steps; the buckets of a pass, after the first pass, which has one; and the collectives of a step of FSDP2: 13 gather, 7 reduce.
STEPS, BUCKETS, OF_STEP = 8, 3, 20


def ran(directory: Path, kind: str, nproc: int = 2) -> list[list[tuple[Operation, list[Any]]]]:
    """Run the job; return by rank each collective of the model with what PyTorch says that it carries, in order of launch."""
    said = results(run_job(directory, "parts.py", kind, nproc=nproc, COMMWATCH_JOB="parts"))
    queries, _ = digest(directory)
    found = queries.operations(0, 1 << 62, None, lambda one: one.dtype in ("float32", "float16"), 100_000)
    of_ranks = []
    for rank, (carried, is_free) in enumerate(said):
        assert is_free or kind == "ddp-compiled"  # Dynamo keeps it
        ops = {op for op, *_ in carried}
        mine = sorted((one for one in found if one.rank == rank and one.op in ops), key=lambda one: one.launch_at)
        assert [one.op for one in mine] == [op for op, *_ in carried]
        of_ranks.append(list(zip(mine, carried, strict=True)))
    return of_ranks


def bucket(index: int, names: Sequence[str]) -> str:
    if len(names) <= 2:
        return f"bucket {index}: {', '.join(names)}"
    return f"bucket {index}: {names[0]} … {names[-1]} ({len(names)} parameters)"


def unit(path: str) -> str:
    return "unit (root)" if path == "6" else f"unit {path}"


def are_buckets(pairs: Sequence[tuple[Operation, list[Any]]]) -> None:
    assert [one.part for one, _ in pairs] == [bucket(*carried[1:]) for _, carried in pairs]


@BOTH_HOOKS
@pytest.mark.parametrize("kind", ["plain", "noted"])
def test_buckets(hook: str, kind: str, tmp_path: Path) -> None:
    """Each all_reduce of DDP has its bucket's index and parameters, as the logger and a communication hook have them.

    Two buckets have the same size. The first pass, before DDP has rebuilt its buckets, has no names.
    """
    for pairs in ran(tmp_path, f"ddp-{kind}"):
        assert len(pairs) == 1 + BUCKETS * (STEPS - 1)
        assert len({one.size_bytes for one, _ in pairs[1:]}) < BUCKETS
        assert pairs[0][0].part is None
        are_buckets(pairs[1:])


@pytest.mark.parametrize("kind", ["static", "accumulate", "compressed", "compiled"])
def test_buckets_of_other_models(kind: str, tmp_path: Path) -> None:
    """Buckets have their names with a static graph, accumulated or compressed gradients, and in a compiled model."""
    for pairs in ran(tmp_path, f"ddp-{kind}"):
        of_last = pairs[-BUCKETS * (STEPS - 2) :]
        are_buckets(of_last)


def test_first_buckets(tmp_path: Path) -> None:
    """Where DDP looks for unused parameters it keeps its first buckets, and these have their names from the first pass on."""
    for pairs in ran(tmp_path, "ddp-unused"):
        are_buckets(pairs)


def test_foreign_collective(tmp_path: Path) -> None:
    """Where a step has another collective of a bucket's size, nothing in it is named."""
    for pairs in ran(tmp_path, "ddp-foreign"):
        of_last = pairs[
            -(1 + BUCKETS) * (STEPS - 2) :
        ]  # the table is valid from the second forward pass on, which follows the other collective
        assert {carried[1] for _, carried in of_last} == {-1, *range(BUCKETS)}
        assert {one.part for one, _ in of_last} == {None}


@BOTH_HOOKS
def test_units(hook: str, tmp_path: Path) -> None:
    """Each all_gather and reduce_scatter of FSDP2 has the path of its unit, also where units have equal sizes. The first step has no names."""
    for pairs in ran(tmp_path, "fsdp"):
        assert [one.part for one, _ in pairs] == [None] * OF_STEP + [unit(path) for _, (_, path) in pairs[OF_STEP:]]


def test_units_beside_an_evaluation(tmp_path: Path) -> None:
    """A step in which FSDP2 gathers units for an evaluation has no names, all others have the right ones."""
    for pairs in ran(tmp_path, "fsdp-evaluate"):
        named = [(one.part, unit(path)) for one, (_, path) in pairs if one.part is not None]
        assert all(part == path for part, path in named)
        assert len(named) == (STEPS - 2) * OF_STEP


def test_replicated_units(tmp_path: Path) -> None:
    """HSDP's all_reduces have the path of their unit, too."""
    for pairs in ran(tmp_path, "fsdp-hsdp", nproc=4):
        named = [(one.op, one.part, unit(path)) for one, (_, path) in pairs if one.part is not None]
        assert {op for op, _, _ in named} == {"all_gather", "reduce_scatter", "all_reduce"}
        assert all(part == path for _, part, path in named)
        assert len(named) == len(pairs) // STEPS * (STEPS - 1)
