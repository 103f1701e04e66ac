"""What operations are for, and whose settings change them."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.advice import RULES, advice_on
from commwatch_agent.analysis.framework_settings import KNOBS, OTHER, REPLICATED, SHARDED, TENSOR, VALUES, role
from tests.agent.analysis.test_advice import CURVE, facts, kind


@pytest.mark.parametrize(
    ("label", "op", "size_bytes", "sharded", "expected"),
    [
        ("default_pg", "all_reduce", 1e6, False, REPLICATED),
        ("default_pg", "reduce_scatter", 1e6, False, REPLICATED),
        ("mesh_dp", "all_gather", 1e6, True, SHARDED),
        ("mesh_dp", "reduce_scatter", 1e6, True, SHARDED),
        ("mesh_replicate", "all_reduce", 1e6, True, SHARDED),
        ("mesh_dp", "all_reduce", 4, True, VALUES),
        ("mesh_tp", "all_reduce", 1e6, False, TENSOR),
        ("mesh_tp", "all_gather", 1e6, True, TENSOR),
        ("mesh_tp", "all_reduce", 4, False, VALUES),
        ("dp_cp", "all_reduce", 1e6, False, REPLICATED),
        ("intra_dp_cp", "reduce_scatter", 1e6, True, SHARDED),
        ("ep_dp", "all_reduce", 1e6, False, REPLICATED),
        ("cp", "all_gather", 1e6, False, OTHER),
        ("mesh_pp", "all_reduce", 1e6, False, OTHER),
        ("default_pg", "all_gather", 1e6, False, OTHER),
        ("default_pg", "all_to_all", 1e6, False, OTHER),
    ],
)
def test_roles(label: str, op: str, size_bytes: float, sharded: bool, expected: str) -> None:
    """Group, operation and size show what operations are for: gradients, sharded parameters, activations of tensor parallelism, single values."""
    assert role(label, op, size_bytes, sharded) == expected


def test_knobs_of_the_framework() -> None:
    """Advice on sharded gradients speaks of FSDP, on replicated ones of DDP, and of neither where it is about something else."""
    sharded = kind(op="reduce_scatter", sharded=True, dtype="float32", curve=CURVE, per_step=100, size_bytes=2e4)
    replicated = sharded._replace(op="all_reduce", sharded=False)
    values = replicated._replace(size_bytes=400.0)
    said = [
        {each.rule: each.do for each in advice_on(facts(one)) if each.rule in KNOBS}
        for one in (sharded, replicated, values)
    ]
    assert set(said[0]) == set(said[1]) == set(KNOBS) <= {rule.name for rule in RULES}
    assert all("FSDP2" in do and "DDP" not in do.replace("FSDP", "") for do in said[0].values())
    assert all("DDP" in do and "FSDP" not in do for do in said[1].values())
    assert set(said[2]) == {"larger_buckets", "overlap"}
    assert said[2]["larger_buckets"] == KNOBS["larger_buckets"][VALUES]
