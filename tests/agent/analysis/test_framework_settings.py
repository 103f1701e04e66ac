"""What operations are for, and whose settings change them."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.advice import RULES, advice_on
from commwatch_agent.analysis.advice_facts import Kind
from commwatch_agent.analysis.framework_settings import (
    DDP,
    DEEPSPEED,
    FSDP,
    FSDP2,
    KNOBS,
    MEGATRON,
    OTHER,
    PLAIN,
    REPLICATED,
    SHARDED,
    TENSOR,
    VALUES,
    in_use,
    listed,
    role,
)
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


def test_overlap_of_ddp() -> None:
    """Advice to those who use DDP says what smaller and larger buckets do, and speaks of no setting that the job is not known to have."""
    text = KNOBS["overlap"][REPLICATED][DDP]
    assert "smaller buckets (`bucket_cap_mb`) start earlier, larger ones have less latency" in text
    assert "`commwatch whatif`" in text
    assert "find_unused_parameters" not in text


#: Words that only advice for users of a framework has.
WORDS = {
    DDP: ("DDP",), FSDP2: ("FSDP2", "fully_shard", "MixedPrecisionPolicy"), FSDP: ("FSDP:", "auto_wrap_policy"),
    DEEPSPEED: ("DeepSpeed", "overlap_comm", "reduce_bucket_size"), MEGATRON: ("Megatron", "--"),
}  # fmt: skip


def said(one: Kind) -> dict[str, str]:
    """What to do, by rule, about operations that all rules on gradients are about."""
    found = one._replace(dtype="float32", curve=CURVE, per_step=100, size_bytes=2e4)
    return {each.rule: each.do for each in advice_on(facts(found)) if each.rule in KNOBS}


@pytest.mark.parametrize(("framework", "sharded"), [
    (DDP, False), (DEEPSPEED, False), (MEGATRON, False), (FSDP2, True), (FSDP, True), (DEEPSPEED, True), (MEGATRON, True),
])  # fmt: skip
def test_knobs_of_the_framework(framework: str, sharded: bool) -> None:
    """Advice for a job with a framework names the settings of that one, and no other's."""
    found = said(
        kind(op="reduce_scatter" if sharded else "all_reduce", sharded=sharded, frameworks=frozenset({framework}))
    )
    assert set(found) == set(KNOBS) - {"further_compression", "exchange_once"} <= {rule.name for rule in RULES}
    for do in found.values():
        assert any(word in do for word in WORDS[framework]), do
        others = {word for name, words in WORDS.items() if name != framework for word in words}
        assert not any(word in do.replace("FSDP2:", "").replace("FSDP:", "") for word in others), do


def test_users_of_ddp_have_it() -> None:
    """A job with DDP is not advised to use DDP; one that calls all_reduce itself is."""
    assert "instead of" not in said(kind(frameworks=frozenset({DDP})))["overlap"]
    assert "DDP instead of `all_reduce` calls" in said(kind(frameworks=frozenset()))["overlap"]


def test_unknown_framework() -> None:
    """Without a known framework, advice names the settings of all that fit the operations: that shard, or that reduce gradients whole."""
    sharded, whole = said(kind(op="reduce_scatter", sharded=True)), said(kind())
    assert all("FSDP2" in do and "DeepSpeed" in do and "DDP:" not in do.replace("FSDP", "") for do in sharded.values())
    assert all("DDP" in do and "DeepSpeed" in do and "FSDP" not in do for do in whole.values())


def test_single_values() -> None:
    """Advice on single values names no framework."""
    values = kind(size_bytes=400.0, dtype="float32", curve=CURVE, per_step=100)
    found = {each.rule: each.do for each in advice_on(facts(values)) if each.rule in KNOBS}
    assert set(found) == {"larger_buckets", "overlap"}
    assert found["larger_buckets"] == KNOBS["larger_buckets"][VALUES][PLAIN]


def test_no_links_on_one_node_with_gloo() -> None:
    """Of a job whose Gloo ranks are on one node, no advice is about a link; what Gloo takes on the CPU is named."""
    slow = kind(backend="gloo", efficiency=0.3, reference="bench", curve=CURVE, dtype="float32")
    about = facts(slow, waits={0: 0.2, 1: 0.2})
    here, apart = (advice_on(each) for each in (about, about._replace(kinds=[slow._replace(local=2)])))
    assert "faster_network" not in {each.rule for each in here}
    assert "faster_network" in {each.rule for each in apart}
    assert not any("NCCL" in each.do for each in (*here, *apart))
    assert "Gloo communicates on the CPU" in next(each.do for each in here if each.rule == "overlap")
    long = about._replace(kinds=[slow._replace(waiting_s=0.01)])
    (uneven,) = (each for each in advice_on(long) if each.rule == "uneven_work")
    assert uneven.title == "ranks leave long transfers at different times"
    assert "cores" in uneven.do
    assert "link" not in uneven.do


def test_of_several_ranks() -> None:
    """The frameworks of a job are those of all its ranks; it is not known only if no rank reports any."""
    assert in_use([["ddp"], None, ["deepspeed"]]) == frozenset({"ddp", "deepspeed"})
    assert in_use([[], None]) == frozenset()
    assert in_use([None]) is None
    assert (listed(None), listed(""), listed("ddp,fsdp2")) == (None, [], ["ddp", "fsdp2"])
