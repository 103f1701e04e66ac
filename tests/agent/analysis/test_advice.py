"""Advice: each rule speaks where it should and not beside it, and its gain is the one worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from commwatch_agent.analysis.advice import RULES, advice_on
from commwatch_agent.analysis.advice_facts import Facts, Kind, Pauses, Whys
from commwatch_agent.analysis.gpu_nic_affinity import GpuNicPair
from commwatch_agent.analysis.headline import awaited, bottleneck
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.waits.links import Sending
from commwatch_agent.ingest.why_late import COMPUTES, IDLE, NO_CORE, PAGES, QUOTA, common_why
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Advice
from commwatch_agent.model.host_views import Complaint
from commwatch_agent.model.model_parts.repeats import Repeat
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_alerts.remedies import remedy
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.spans import ranks

#: 50 us a message, 1 GB/s.
CURVE = Curve(50e-6, 1e-9)


def kind(**more: Any) -> Kind:
    """The exchange of gradients of four ranks of one node: 10 operations of 1 MB in 40 ms of a step of 100 ms."""
    about: dict[str, Any] = {"group": "data", "op": "all_reduce", "group_size": 4, "per_step": 10.0, "size_bytes": 1e6}
    return Kind(**{**about, "seconds": 0.04, "local": 4, **more})


def facts(*kinds: Kind, **more: Any) -> Facts:
    """A job with 40% of communication in steps of 100 ms, all of it exposed."""
    about: dict[str, Any] = {"step_s": 0.1, "comm": 0.4, "exposed": 0.4, "kinds": list(kinds) or [kind()]}
    return Facts(**{**about, "waits": {}, "bubble": None, "findings": [], **more})


def given(rule: str, about: Facts) -> Advice | None:
    """What one rule has to say."""
    found = [each for each in advice_on(about) if each.rule == rule]
    assert len(found) <= 1
    return found[0] if found else None


def gain(rule: str, about: Facts) -> float:
    """The share of a step that it promises."""
    found = given(rule, about)
    assert found is not None
    assert found.because
    assert found.saves_share is not None
    return found.saves_share


#: Ctrl-C has ended a job.
CTRL_C = Whys({}, interrupted=True)


def finding(severity: str, name: str = "no_gdr") -> Finding:
    return Finding(name, severity, "GPUDirect RDMA is not used", "rank 0 copies", "slower", "load nvidia-peermem", [])


def place(distance: str, rank: int = 3, **more: Any) -> GpuNicPair:
    """A rank's GPU and the device that its traffic goes through."""
    about: dict[str, Any] = {"nearest": "mlx5_0:1", "nearest_distance": distance, "seen": True, **more}
    return GpuNicPair(rank, f"0000:{rank:02x}:00.0", "mlx5_0:1", distance, **about)


def complaint(kind_: str) -> Complaint:
    return Complaint(kind_, "mlx5_0:1", "is not well", "look at the cable")


def chosen(**more: Any) -> NcclOperations:
    """Twenty all_reduces of 64 MiB of the group of gradients, with Tree/LL."""
    about: dict[str, Any] = {
        "job_id": "job", "group_id": "g", "group": "data", "op": "all_reduce", "size_log2": 26, "algorithm": "Tree",
        "protocol": "LL", "channels": 2, "ranks": [0], "count": 20, "bytes": 20 << 26, "mean_s": 0.02, "queued_s": 0.001,
        "busbw": 5e9, "last_channel": 1, "last_share": 0.6, "apart_s": 1e-4, "remark": "slow",
    }  # fmt: skip
    return NcclOperations(**{**about, **more})


SPEAKS: dict[str, list[Facts]] = {
    "scarce_cores": [facts(for_cores=0.2)],
    "straggler": [facts(late={1: 0.2}), facts(late={1: 0.2}, waits={0: 0.2, 1: 0.15, 2: 0.3})],
    "pauses": [facts(pauses=Pauses(1, 9, 400, 2.8, 0.27)), facts(pauses=Pauses(1, 9, 400, 2.8, 0.27), late={2: 0.2})],
    "exchange_once": [facts(kind(repeat=Repeat(4, 0.75))), facts(kind(repeat=Repeat(2, 0.5)), comm=0.05)],
    "accumulate_gradients": [facts(), facts(kind(op="reduce_scatter")), facts(exposed=None)],
    "keep_parameters": [facts(kind(op="all_gather", sharded=True, repeat=Repeat(1, 0.5)))],
    "larger_buckets": [facts(kind(per_step=100, size_bytes=1e4, curve=CURVE))],
    "overlap": [facts()],
    "below_the_link": [facts(kind(efficiency=0.3, reference="catalogue"))],
    "tensor_parallel_in_node": [
        facts(kind(group="tensor", group_size=4, local=2), kind(seconds=0.001, curve=CURVE)),
        facts(kind(group="mesh_tp", group_size=2, local=1), kind(seconds=0.001)),
    ],
    "uneven_work": [
        facts(kind(waiting_s=0.02), waits={0: 0.2, 1: 0.15, 2: 0.3}),
        facts(waits={0: 0.2, 1: 0.1, 2: 0.3}),
        facts(waits={0: 0.12, 1: 0.01}),
        facts(waits={0: 0.12, 1: 0.01}, exposed=0.07),
        facts(kind(waiting_s=0.02), waits={0: 0.2, 1: 0.15, 2: 0.3}, exposed=0.11),
        facts(waits={0: 0.2, 1: 0.15, 2: 0.3}, bubble=0.2),
    ],
    "compression": [facts(kind(dtype="float32")), facts(kind(dtype="bfloat16"))],
    "faster_network": [facts(kind(curve=CURVE))],
    "micro_batches": [facts(bubble=0.3, pipeline=True)],
    "nccl_choice": [
        facts(choices=[chosen()]),
        facts(choices=[chosen(), chosen(protocol="Simple", busbw=2e10, remark="")]),
    ],
    "nccl_finding": [facts(findings=[finding("warning")])],
    "log_error": [facts(findings=[finding("error")])],
    "gpu_far_from_nic": [
        facts(kind(local=2), network=Network([place("SYS"), place("PIX", rank=0)])),
        facts(kind(local=2), network=Network([place("SYS", nearest_distance="PIX")])),
        facts(kind(local=2), network=Network([place("SYS", seen=False)])),
    ],
    "nic_below_its_rate": [facts(kind(local=2), network=Network((), [complaint(each)])) for each in ("slow", "down")],
    "link_errors": [facts(kind(local=2), network=Network((), [complaint(each)])) for each in ("errors", "congestion")],
}
SILENT: dict[str, list[Facts]] = {
    "scarce_cores": [facts(), facts(for_cores=0.19)],
    "straggler": [
        facts(waits={0: 0.2, 1: 0.15, 2: 0.3}),
        facts(waits={0: 0.2, 1: 0.01, 2: 0.3}),  # in few steps
    ],
    "pauses": [
        facts(),
        facts(pauses=Pauses(1, 9, 400, 2.8, 0.09)),
        facts(pauses=Pauses(1, 9, 400, 2.8, 0.2), late={1: 0.2}),
    ],
    "exchange_once": [
        facts(),
        facts(kind(op="all_gather", repeat=Repeat(1, 0.5))),
        facts(kind(repeat=Repeat(4, 0.75)), exposed=0.0),  # hidden
    ],
    "keep_parameters": [
        facts(kind(op="all_gather", sharded=True)),
        facts(kind(op="reduce_scatter", sharded=True, repeat=Repeat(2, 0.5))),
        facts(kind(op="all_gather", sharded=True, repeat=Repeat(1, 0.5)), exposed=0.09),  # not worth the memory
    ],
    "accumulate_gradients": [
        facts(kind(repeat=Repeat(4, 0.75))),  # that comes first
        facts(comm=0.29),
        facts(exposed=0.05),  # hidden
        facts(kind(group="tensor")),
        facts(kind(op="all_gather")),
        facts(kind(per_step=1, size_bytes=4)),  # a metric
        facts(kind(waiting_s=0.03)),  # 14% of what remains
    ],
    "larger_buckets": [
        facts(kind(per_step=100, size_bytes=1e4)),  # no curve
        facts(kind(per_step=2, size_bytes=1e8, curve=CURVE)),
        facts(kind(per_step=1, size_bytes=1e3, curve=CURVE)),
        facts(kind(per_step=100, size_bytes=1e4, curve=Curve(1e-3, 0.0))),
        facts(kind(op="barrier", size_bytes=0, curve=CURVE)),
    ],
    "overlap": [facts(kind(per_step=1)), facts(exposed=None), facts(exposed=0.1), facts(comm=0.08, exposed=0.08)],
    "below_the_link": [
        facts(kind(efficiency=0.3, reference="own_best")),
        facts(kind(efficiency=0.3, reference="hardware")),
        facts(kind(efficiency=0.8, reference="bench")),
        facts(kind()),
    ],
    "tensor_parallel_in_node": [
        facts(kind(group="tensor")),
        facts(kind(group="tensor", group_size=16, local=4)),  # larger than a node
        facts(kind(local=2)),
        facts(kind(group="tensor", local=2, seconds=0.005)),
    ],
    "uneven_work": [
        facts(waits={0: 0.2, 1: 0.15, 2: 0.3}, late={1: 0.1}),
        facts(waits={0: 0.08, 1: 0.05, 2: 0.09}),
        facts(waits={0: 0.09, 1: 0.01}),
        facts(waits={0: 0.5}),
        facts(waits={0: 0.2, 1: 0.15, 2: 0.3}, bubble=0.2, pipeline=True),
        facts(kind(waiting_s=0.02), waits={0: 0.2, 1: 0.15, 2: 0.3}, exposed=0.09),  # hidden behind compute
        facts(waits={0: 0.2, 1: 0.15, 2: 0.3}, for_cores=0.2),  # too few cores
    ],
    "compression": [
        facts(kind()),
        facts(kind(dtype="float32", size_bytes=4)),  # a metric
        facts(kind(dtype="float32", waiting_s=0.03)),
        facts(kind(dtype="float32"), comm=0.2),
        facts(kind(dtype="float32"), exposed=0.01),
    ],
    "faster_network": [
        facts(),
        facts(kind(curve=CURVE, waiting_s=0.03)),
        facts(kind(curve=Curve(1e-3, 1e-9))),
        facts(kind(curve=CURVE), comm=0.2),
    ],
    "micro_batches": [facts(), facts(bubble=0.05, pipeline=True), facts(bubble=0.3)],
    "nccl_choice": [
        facts(choices=[chosen(protocol="Simple", remark="")]),
        facts(choices=[chosen(), chosen(protocol="Simple", busbw=5e9, remark="")]),  # measured, and as slow
        facts(choices=[chosen(group="other")]),  # of which nothing is known
        facts(kind(seconds=0.0005), choices=[chosen()]),  # hardly
        facts(choices=[chosen()], exposed=0.0),  # hidden
    ],
    "nccl_finding": [facts(), facts(findings=[finding("info")])],
    "log_error": [
        facts(),
        facts(findings=[finding("warning")]),
        facts(findings=[finding("error", "gloo_peer_lost")], whys=CTRL_C),
    ],
    "gpu_far_from_nic": [
        facts(kind(local=2), network=Network([place("NODE")])),
        facts(network=Network([place("SYS")])),  # no group crosses nodes
        facts(kind(local=2, seconds=0.005), network=Network([place("SYS")])),  # hardly
        facts(kind(local=2)),  # not known
    ],
    "nic_below_its_rate": [
        facts(kind(local=2), network=Network((), [complaint("errors")])),
        facts(network=Network((), [complaint("slow")])),
    ],
    "link_errors": [
        facts(kind(local=2), network=Network((), [complaint("slow")])),
        facts(network=Network((), [complaint("errors")])),
    ],
}


def test_long_transfers_are_no_turns() -> None:
    """Unless ranks wait much longer than transfers last, as these do over a slow link, ranks are not said to take turns being late."""
    turns, waits = "the ranks take turns being late", {0: 0.2, 1: 0.15, 2: 0.2}
    for waiting_s, is_in_turn in ((0.005, False), (0.025, False), (0.03, True)):
        found = given("uneven_work", facts(kind(waiting_s=waiting_s), waits=waits))
        assert found is not None
        assert (found.title == turns) == is_in_turn == bool(found.remedies)


def test_every_rule_has_cases() -> None:
    """Each rule has a case that triggers it and one that does not."""
    names = {rule.name for rule in RULES}
    assert set(SPEAKS) == set(SILENT) == names
    assert len(names) == len(RULES)


@pytest.mark.parametrize(("rule", "about"), [(rule, about) for rule, cases in SPEAKS.items() for about in cases])
def test_speaks(rule: str, about: Facts) -> None:
    """A rule gives advice where its numbers call for it, with the observation, the remedy and the expected gain."""
    found = given(rule, about)
    assert found is not None
    assert all(found.because)
    assert found.title
    assert found.do
    assert found.gain
    assert found.saves_share is None or 0.01 <= found.saves_share < 1


@pytest.mark.parametrize(("rule", "about"), [(rule, about) for rule, cases in SILENT.items() for about in cases])
def test_silent(rule: str, about: Facts) -> None:
    """A rule is silent where one of its conditions does not hold."""
    assert given(rule, about) is None


def test_choice_is_named() -> None:
    """The advice names choice and sizes, what was measured, and what was faster, and promises no gain."""
    found = given(
        "nccl_choice", facts(choices=[chosen(), chosen(algorithm="Ring", protocol="Simple", busbw=2e10, remark="")])
    )
    assert found is not None
    assert found.title == "NCCL chose Tree/LL for all_reduce of group data, 32 MiB to 64 MiB"
    assert "20 of the latest took 20 ms on average, busbw 5 GB/s" in found.because
    assert "with Ring/Simple, operations of 32 MiB to 64 MiB had busbw 20 GB/s" in found.because
    assert "NCCL_PROTO" in found.do
    assert found.saves_share is None


def test_steps_that_bring_the_share_under_the_limit() -> None:
    """Of 100 ms with 40 ms of gradients: k x 60 ms of compute and one exchange; from k = 2 on it is under 30% (40 / 160)."""
    found = given("accumulate_gradients", facts())
    assert found is not None
    assert "over 2 steps reduces communication from 40% to 25%" in found.gain
    assert found.saves_share == pytest.approx(0.4 / 2)  # a sample takes 60 + 20 ms instead of 100
    # 60%: 60 / (k x 40 + 60) under 30% from k = 4 on (60 / 220 = 27%).
    found = given("accumulate_gradients", facts(kind(seconds=0.06), comm=0.6, exposed=0.6))
    assert found is not None
    assert "over 4 steps reduces communication from 60% to 27%" in found.gain


def test_no_more_steps_than_pay_off() -> None:
    """No more than four steps are advised, which save three quarters of the exchange, however many would bring the share under the limit."""
    # Of a step, 30% are the exchange, and 20% other communication: (k x 0.2 + 0.3) / (k x 0.7 + 0.3) is 30% from k = 21 on.
    about = facts(kind(seconds=0.3), kind(group="tensor", seconds=0.2), comm=0.5, exposed=0.5, step_s=1.0)
    found = given("accumulate_gradients", about)
    assert found is not None
    assert "over 4 steps reduces communication from 50% to 35%, which is still above 30%, and saves" in found.gain
    assert found.saves_share == pytest.approx(0.3 * 3 / 4)
    assert [each.whatif for each in found.remedies] == [{"accumulate": 4}]


def test_steps_of_hidden_gradients() -> None:
    """80 of 100 ms are the exchange, 20 of them exposed: k steps take k x 80 ms and 20; 80 of them are under 30% from k = 4 on (80 / 340)."""
    found = given("accumulate_gradients", facts(kind(seconds=0.08), comm=0.8, exposed=0.2))
    assert found is not None
    assert "over 4 steps reduces communication from 80% to 24%" in found.gain
    assert found.saves_share == pytest.approx(0.2 * 3 / 4)


def test_steps_are_not_enough() -> None:
    """If other communication alone is above 30% of the rest, the advice says that accumulating leaves it above."""
    about = facts(kind(seconds=0.02), kind(group="tensor", seconds=0.04), comm=0.6, exposed=0.6)
    found = given("accumulate_gradients", about)
    assert found is not None
    assert ", which is still above 30%," in found.gain


def test_gradients_of_several_backward_passes() -> None:
    """Of four exchanges in 40 of 100 ms, three are not needed; the advice names the setting. Larger buckets are those of each pass."""
    ddp = {"frameworks": frozenset({"ddp"}), "repeat": Repeat(4, 0.75)}
    found = given("exchange_once", facts(kind(**ddp)))
    assert found is not None
    assert found.saves_share == pytest.approx(0.3)
    assert found.gain == "exchanging them only in the last one would save up to 30% of a step"
    assert "each step has 4 backward passes, and each of them exchanges the same gradients" in found.because
    assert found.do.startswith("DDP: `no_sync()`")
    assert gain("exchange_once", facts(kind(**ddp), exposed=0.2)) == pytest.approx(0.15)
    assert given("larger_buckets", facts(kind(per_step=4, size_bytes=1e4, curve=CURVE, **ddp))) is None
    sharded = kind(op="reduce_scatter", sharded=True, frameworks=frozenset({"fsdp2"}), repeat=Repeat(2, 0.5))
    of_fsdp = given("exchange_once", facts(sharded))
    assert of_fsdp is not None
    assert "set_requires_gradient_sync(False)" in of_fsdp.do


def test_parameters_that_are_gathered_again() -> None:
    """Of 40 ms of gathers, those for the backward pass take 16; the advice names the setting and its price."""
    found = given("keep_parameters", facts(kind(op="all_gather", sharded=True, repeat=Repeat(1, 0.4))))
    assert found is not None
    assert found.saves_share == pytest.approx(0.16)
    assert found.gain == "keeping them would save up to 16% of a step"
    assert "40% of the gathered bytes are units that the forward pass has gathered already" in found.because
    assert "reshard_after_forward=False" in found.do
    assert "memory" in found.do


def test_larger_buckets_by_the_model() -> None:
    """100 all_reduces of 10 kB: 6 x 50 us of latency each is 30 ms; in one of 1 MB, under nine times its latency, 0.3 ms."""
    about = facts(kind(per_step=100, size_bytes=1e4, seconds=0.04, curve=CURVE))
    assert gain("larger_buckets", about) == pytest.approx((0.030 - 0.0003) / 0.1)


def test_latency_of_slower_operations() -> None:
    """A curve through the job's fastest operations splits the time of the slower ones in its proportion: 300 of 315 us of 40 ms are latency."""
    about = facts(kind(per_step=100, size_bytes=1e4, seconds=0.04, curve=CURVE, reference="own_best"))
    assert gain("larger_buckets", about) == pytest.approx(0.04 * 300 / 315 * (1 - 1 / 100) / 0.1)


def test_half_hidden() -> None:
    """Where half of the communication is hidden, half as much is to be gained."""
    assert gain("accumulate_gradients", facts(exposed=0.2)) == pytest.approx(0.1)


def test_compression_saves_bytes_only() -> None:
    """fp16 halves what is not latency: 40 ms - 3 ms; int8 saves three quarters of it."""
    found = given("compression", facts(kind(dtype="float32", curve=CURVE)))
    assert found is not None
    assert "fp16 18%" in found.gain
    assert "int8 28%" in found.gain
    half = given("compression", facts(kind(dtype="bfloat16", curve=CURVE)))
    assert half is not None
    assert "fp16" not in half.gain
    assert "PowerSGD" in half.do


def test_only_forms_of_its_setting() -> None:
    """Only a communication hook, such as DDP's, makes any form of gradients; FSDP2's setting, and a conversion by hand, make 16 bits of them."""
    ddp, fsdp = frozenset({"ddp"}), frozenset({"fsdp2"})
    shards = kind(op="reduce_scatter", sharded=True, dtype="float32", curve=CURVE)
    for about, forms in (
        (kind(dtype="float32", curve=CURVE, frameworks=ddp), ["fp16", "int8", "top-k (1%)"]),
        (kind(dtype="float32", curve=CURVE, frameworks=frozenset()), ["fp16"]),
        (shards._replace(frameworks=fsdp), ["fp16"]),
        (shards._replace(frameworks=frozenset({"deepspeed"}), dtype="bfloat16"), ["int8"]),
    ):
        found = given("compression", facts(about))
        assert found is not None
        assert [each.name for each in found.remedies] == forms


def test_compression_by_what_a_setting_does() -> None:
    """Where fp16, which the settings give, saves nothing, there is no advice for the sake of int8; nor for shards that are bfloat16 already."""
    little = kind(dtype="float32", seconds=0.0315, curve=CURVE, per_step=100, size_bytes=1e4)
    assert given("compression", facts(little)) is None
    shards = kind(op="reduce_scatter", sharded=True, dtype="bfloat16", frameworks=frozenset({"fsdp2"}))
    assert given("compression", facts(shards)) is None
    zero = given("compression", facts(shards._replace(frameworks=frozenset({"deepspeed"}))))
    assert zero is not None
    assert "zero_quantized_gradients" in zero.do
    assert given("compression", facts(kind(op="reduce_scatter", sharded=True, dtype="float32"))) is not None


def test_twice_the_bandwidth() -> None:
    """Twice the bandwidth halves what is not latency: (40 - 3) / 2 of 100 ms, so 21.5 of 81.5 ms are left."""
    found = given("faster_network", facts(kind(curve=CURVE)))
    assert found is not None
    assert found.saves_share == pytest.approx(0.185)
    assert "reduce communication to 26% of it" in found.gain


def test_groups_at_the_same_time() -> None:
    """Groups that communicate at the same time save no more together than half of the communication."""
    three = [kind(group=group, seconds=0.036, curve=CURVE) for group in ("data", "context", "expert")]
    assert gain("faster_network", facts(*three)) == pytest.approx(0.2)


def test_only_what_is_on_the_network() -> None:
    """If groups span nodes, a faster network saves time of these only: half of 8 - 3 of 100 ms; other groups are within a node."""
    tensor = kind(group="tensor", seconds=0.035, curve=CURVE)
    found = given("faster_network", facts(tensor, kind(seconds=0.008, local=2, curve=CURVE)))
    assert found is not None
    assert found.saves_share == pytest.approx(0.025)
    assert any("group data" in each for each in found.because)
    assert given("faster_network", facts(tensor, kind(seconds=0.005, local=2, curve=CURVE))) is None


def test_ranks_that_wait_for_a_link() -> None:
    """Where ranks wait for a slow link during half of their communication, no work is uneven."""
    uneven = facts(kind(waiting_s=0.02), waits={0: 0.2, 1: 0.15, 2: 0.3})
    assert given("uneven_work", uneven._replace(whys=Whys({}, slow_link=0.05))) is not None
    assert given("uneven_work", uneven._replace(whys=Whys({}, slow_link=0.3))) is None


def test_full_links() -> None:
    """Without a reference the network limits a job if data waits for its links during most of the communication: half of that time is saved."""
    full = facts(kind(backend="gloo"), sending=Sending(0.3, 24e6))
    found = given("faster_network", full)
    assert found is not None
    assert found.saves_share == pytest.approx(0.15)
    assert found.because[-1] == "the links between ranks have data to send 30% of the time, and send 24 MB/s meanwhile"
    assert gain("faster_network", full._replace(sending=Sending(0.95, 24e6))) == pytest.approx(0.2)
    assert given("faster_network", full._replace(sending=Sending(0.15, 24e6))) is None
    assert given("faster_network", full._replace(sending=None)) is None
    # Ten of the 40 ms are waiting for a late rank: of the whole step, the links are full 30%.
    late = full._replace(kinds=[kind(backend="gloo", waiting_s=0.01)])
    assert gain("faster_network", late) == pytest.approx(0.3 / 2)


def test_link_that_the_settings_name() -> None:
    """Gloo on one node passes no link, unless the settings name one for its group."""
    for reference, speaks in (("bench", False), ("catalogue", True)):
        of_one = facts(kind(backend="gloo", curve=CURVE, efficiency=0.3, reference=reference))
        assert of_one.on_one_cpu is not speaks
        for rule in ("faster_network", "below_the_link"):
            assert (given(rule, of_one) is not None) is speaks


def test_tensor_parallel_by_the_nodes_own_curve() -> None:
    """Ten all_reduces of 1 MB among four at 50 us and 1 GB/s take 10 x (0.3 + 1.5) ms in the node, 40 ms now."""
    about = SPEAKS["tensor_parallel_in_node"][0]
    assert gain("tensor_parallel_in_node", about) == pytest.approx((0.04 - 0.018) / 0.1)
    (unknown,) = [
        each for each in advice_on(SPEAKS["tensor_parallel_in_node"][1]) if each.rule == "tensor_parallel_in_node"
    ]
    assert unknown.saves_share is None


def test_last_operation_is_not_hidden() -> None:
    """Of ten operations a step, nine can run beside compute: of 40% exposed, 36% can be hidden."""
    assert gain("overlap", facts()) == pytest.approx(0.36)


def test_late_in_turn() -> None:
    """Where each rank waits for others, alike work would save what they wait on average."""
    found = given("uneven_work", facts(waits={0: 0.2, 1: 0.15, 2: 0.3}))
    assert found is not None
    assert found.saves_share == pytest.approx(0.65 / 3)
    assert found.because == ["each rank waits for others 15% to 30% of its step time, 22% on average"]


def test_bubble_of_twice_the_micro_batches() -> None:
    """(p-1)/(m+p-1) = 1/3 becomes 1/5 with twice the m; a sample then takes (2/3)/(4/5) of the time."""
    assert gain("micro_batches", facts(bubble=1 / 3, pipeline=True)) == pytest.approx(1 - (2 / 3) / (4 / 5))


def test_some_wait_now_and_then() -> None:
    """If ranks wait for others and none is known as late, advice states that and who hardly waits, with the gain of having no lateness at all."""
    found = given("uneven_work", facts(waits={0: 0.3, 1: 0.05}))
    assert found is not None
    assert found.title == "ranks wait for others, some much longer than others"
    assert found.saves_share == pytest.approx(0.3)
    assert [dict(each.whatif) for each in found.remedies] == [{"no_late": True}]
    one = given("uneven_work", facts(waits={0: 0.5, 1: 0.0, 2: 0.5}))
    assert one is not None
    assert one.title == "ranks 0, 2 wait for others, and rank 1 hardly ever"


def test_what_remains_without_waiting() -> None:
    """Of steps of 100 ms with 40 ms of communication, 20 of them waiting: of the other 80 ms 20 are communication, 25%."""
    about = facts(kind(waiting_s=0.02), waits={0: 0.2, 1: 0.01, 2: 0.2}, late={1: 0.2})
    rest = about.without_waiting()
    assert (rest.step_s, rest.comm, rest.exposed) == pytest.approx((0.08, 0.25, 0.25))
    assert [each.seconds for each in rest.kinds] == pytest.approx([0.02])
    straggler, overlap = advice_on(about)
    assert (straggler.rule, overlap.rule) == ("straggler", "overlap")
    assert overlap.because[0] == "transfer takes 20% of a step (exposed: 20%), beside 20% of waiting for late ranks"
    assert overlap.saves_share == pytest.approx(0.8 * 0.25 * 0.9)
    assert facts(kind(waiting_s=0.0)).without_waiting() == facts(kind(waiting_s=0.0))


def test_waiting_for_a_late_rank_that_compute_hides() -> None:
    """A late rank costs no more than is exposed: on a GPU, ranks wait for it while they compute on. All that is exposed may be of one of two ranks."""
    waiting = facts(late={1: 0.79}, waits={0: 0.79, 1: 0.0}, comm=0.39, exposed=0.26)
    found = given("straggler", waiting)
    assert found is not None
    assert (found.because, found.gain) == (
        ["the others wait 79% of the time for rank 1 (the comm share is lower, as a mean of all ranks)"],
        "would save up to 52% of a step",
    )


def test_a_straggler_costs_more_than_operations_waited() -> None:
    """What is known of a straggler counts as waiting also where the operations show less of it, as in the headline: the rest is transfer."""
    rest = facts(kind(seconds=0.04), late={1: 0.4}, ranks=4).without_waiting()
    assert (rest.left_out, rest.step_s, rest.comm) == pytest.approx((0.3, 0.07, 1 / 7))
    assert [each.seconds for each in rest.kinds] == pytest.approx([0.01])
    whole = facts(kind(seconds=0.04, waiting_s=0.04), late={1: 0.9}, ranks=4).without_waiting()
    assert (whole.comm, [each.seconds for each in whole.kinds]) == (0.0, [0.0])


def test_ranks_without_cores() -> None:
    """If main threads wait for CPU cores, that is advice; not where late ranks lack them, which their advice has."""
    found = given("scarce_cores", facts(late={1: 0.05}, for_cores=0.55, whys=Whys({1: COMPUTES})))
    assert found is not None
    assert found.gain == "would save up to 55% of a step"
    assert found.because == [
        "their main threads were ready to run, but had no core, 55% of the time (mean of the ranks, over half a minute at most)"
    ]
    assert advice_on(facts(for_cores=0.2))[0].rule == "scarce_cores"
    for quiet in (
        {"for_cores": 0.19},
        {},
        {"for_cores": 0.6, "late": {1: 0.4}, "ranks": 4, "whys": Whys({1: NO_CORE})},
    ):
        assert "scarce_cores" not in [each.rule for each in advice_on(facts(**quiet))]


def test_cores_and_threads() -> None:
    """Advice on cores has how many threads compute on how many cores, as far as that is known, of the node with the most threads."""
    two, six = Cores(2, 2, None), Cores(2.0, 6, 6)
    for nodes, says in (
        ({}, None),
        ({"a": [Cores(2, None, None)], "b": [Cores(None, 4, None)]}, None),
        (
            {"a": [six, six]},
            "12 threads of 2 ranks on a compute, and each rank may use 2 cores, which others may use, too",
        ),
        (
            {"a": [two], "b": [six, Cores(1.5, 6, 6)]},
            "12 threads of 2 ranks on b compute, and each rank may use 1.5 or 2 cores, which others may use, too",
        ),
    ):
        found = given("scarce_cores", facts(for_cores=0.5, cores=nodes))
        assert found is not None
        assert found.because[1:] == ([] if says is None else [says])


@pytest.mark.parametrize("rule", ["scarce_cores", "straggler"])
def test_one_thread_already(rule: str) -> None:
    """Where all ranks are known to have one thread of OpenMP, advice asks for fewer only of a script that asks for more itself; else of all."""
    why = {"late": {1: 0.4}, "whys": Whys({1: NO_CORE})} if rule == "straggler" else {}
    one = Cores(2, 1, 1)
    for every, asks in (
        ([one, one], False),
        ([one], True),
        ([one, Cores(2, 1, None)], True),
        ([one, Cores(2, 7, 1)], False),
        ([one, Cores(2, None, 1)], False),
        ([one, Cores(2, 6, 6)], True),
    ):
        found = given(rule, facts(for_cores=0.5, ranks=2, cores={"a": every}, **why))
        assert found is not None
        assert ("threads (OMP_NUM_THREADS)" in found.do) == asks
        assert ("OMP_NUM_THREADS is 1 already" in found.do) == (not asks)


def test_order() -> None:
    """Errors of the job come first; ranks without cores before a rank that pauses or is hardly late, which may follow from that; then what saves most."""
    about = facts(
        comm=0.12,
        for_cores=0.25,
        late={1: 0.06},
        ranks=4,
        whys=Whys({1: COMPUTES}),
        pauses=Pauses(2, 5, 100, 9.0, 0.4),
        findings=[finding("error"), finding("warning")],
    )
    found = [each.rule for each in advice_on(about)]
    assert found[:4] == ["log_error", "scarce_cores", "straggler", "pauses"]
    assert found[-1] == "nccl_finding"
    lost = facts(findings=[finding("error", "gloo_peer_lost")])
    assert advice_on(lost)[0].rule == "log_error"
    assert "log_error" not in [each.rule for each in advice_on(lost._replace(whys=CTRL_C))]


def test_incident_of_a_late_rank() -> None:
    """The advice on a late rank leads to its incident only if it has one."""
    late = {"waits": {0: 0.2, 1: 0.01}, "late": {1: 0.42}}
    without = given("straggler", facts(**late))
    with_one = given("straggler", facts(**late, whys=Whys({}, have_incidents=frozenset({1}))))
    assert without is not None
    assert with_one is not None
    assert "incident" not in without.do
    assert with_one.do.removeprefix(without.do) == " Its incident and `commwatch diagnose` show where in its code."


@pytest.mark.parametrize("cores", [None, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("why", ["", COMPUTES, NO_CORE, QUOTA])
@pytest.mark.parametrize("late", [{}, {1: 0.05}, {1: 0.2}, {1: 0.4}, {1: 0.8}, {1: 0.3, 2: 0.2}])
@pytest.mark.parametrize("waited_s", [0.0, 0.01, 0.03])
def test_headline_names_the_first_advice(
    cores: float | None, why: str, late: dict[int, float], waited_s: float
) -> None:
    """Headline and advice name the same to look at first: a late rank, or the CPUs."""
    about = facts(
        kind(waiting_s=waited_s),
        late=late,
        for_cores=cores,
        ranks=4,
        whys=Whys(dict.fromkeys(late, why) if why else {}),
    )
    named = awaited(late, about.waiting)
    headline = bottleneck(
        about.comm, about.exposed, about.waiting, None, named, why=common_why(about.whys.late, named), cores=cores, stragglers=late
    )  # fmt: skip
    first, *others = advice_on(about)
    assert (first.rule == "scarce_cores") == ("look first at the CPUs" in headline), (headline, first.title)
    if first.rule == "straggler":
        largest = max((each.saves_share or 0.0 for each in others), default=0.0)
        assert ranks(late) in headline or (first.saves_share or 0.0) >= largest
    if "look first at rank" in headline or (late and "not the network" in headline):
        assert first.rule == "straggler"


def test_messages_are_not_hidden_behind_compute() -> None:
    """Waiting for messages is no transfer that compute could hide: only what remains without it counts for overlap."""
    assert given("overlap", facts(kind(op="recv"), bubble=0.4, pipeline=True)) is None
    both = given("overlap", facts(kind(op="recv", seconds=0.02), kind(op="all_reduce", seconds=0.02), bubble=0.2))
    assert both is not None
    assert "all_reduce" in both.because[1]
    assert both.saves_share == pytest.approx(0.2 * 0.9)


def test_serving_ranks_wait_for_requests() -> None:
    """Of iterations, which may be a server's, no advice takes the waiting for an idle pipeline or uneven work."""
    waits = {"waits": {0: 0.2, 1: 0.15, 2: 0.3}}
    for about in (facts(bubble=0.66, pipeline=True, trains=False), facts(**waits, trains=False)):
        assert not {"micro_batches", "uneven_work"} & {each.rule for each in advice_on(about)}


def test_two_late_ranks() -> None:
    """Two ranks for which the others wait are late together."""
    found = given("straggler", facts(late={1: 0.28, 3: 0.27}))
    assert found is not None
    assert found.title == "ranks 1, 3 are late and the others wait for them"
    assert found.saves_share == pytest.approx(0.28)


def test_why_the_share_is_lower() -> None:
    """The communication share is lower as a mean of all ranks only as far as the late rank does not wait; long steps are left out of it, too."""
    says = {}
    for number, comm in ((2, 0.3), (4, 0.3), (4, 0.11), (4, 0.5)):
        ((because, *_), *_) = (each.because for each in advice_on(facts(late={1: 0.4}, ranks=number, comm=comm)))
        says[number, comm] = because.removeprefix("the others wait 40% of the time for rank 1")
    mean = " (the comm share is lower, as a mean of all ranks)"
    assert says == {
        (2, 0.3): mean,
        (4, 0.3): mean,
        (4, 0.11): " (the comm share is lower: a mean of all ranks over the whole period, without long steps)",
        (4, 0.5): "",
    }


def test_a_known_reason_is_in_the_advice() -> None:
    """If a late rank lacks CPU time, the first advice is how to give it more; without a reason the advice has its general text."""
    late = {"waits": {0: 0.2, 1: 0.01}, "late": {1: 0.42}}
    starved, *_ = advice_on(facts(**late, whys=Whys({1: NO_CORE})))
    assert starved.title == "rank 1 is late, waiting for a CPU core, and the others wait for it"
    assert starved.do.startswith("Give that rank a core of its own")
    plain, *_ = advice_on(facts(**late, whys=Whys({1: IDLE, 0: NO_CORE})))
    assert plain.title == "rank 1 is late and the others wait for it"
    assert plain.do.startswith("It waits instead of computing")
    unknown, *_ = advice_on(facts(**late))
    assert unknown.do.startswith("Find out what it does before its collectives")
    (both, *_) = advice_on(facts(late={1: 0.3, 2: 0.3}, ranks=4, whys=Whys({1: QUOTA, 2: QUOTA})))
    assert both.title == "ranks 1-2 are late, stopped by a CPU quota, and the others wait for them"


@pytest.mark.parametrize(
    ("why", "fits", "others"),
    [
        (COMPUTES, "batch and the sequence lengths", ("loader", "disk", "throttled")),
        (IDLE, "a slow loader or disk", ("batch", "throttled", "swap")),
        (PAGES, "memory from disk", ("batch", "loader", "throttled")),
        ("", "Typical are", ()),
    ],
)
def test_advice_fits_the_reason(why: str, fits: str, others: tuple[str, ...]) -> None:
    """Advice on a late rank begins with the place in its code, and has only what fits its reason; the remedy of its incident is the same."""
    at, about = "crunch (train.py:7)", {"waits": {0: 0.2, 1: 0.01}, "late": {1: 0.42}}
    whys = Whys({1: why} if why else {}, have_incidents=frozenset({1}), places={1: at})
    found = given("straggler", facts(**about, whys=whys))
    assert found is not None
    assert found.do == remedy("straggler", why, {"place": at})
    assert at in found.do.partition(". ")[0]
    assert fits in found.do
    assert not [each for each in others if each in found.do]
    elsewhere = given("straggler", facts(**about, whys=whys._replace(places={})))
    assert elsewhere is not None
    assert at not in elsewhere.do
    assert elsewhere.do.endswith(" show where in its code.")


def test_late_ranks_at_several_places() -> None:
    """Of late ranks in different places of the code, the advice names none of these; of ranks in one place, it does."""
    about, why = {"late": {1: 0.3, 2: 0.3}, "ranks": 4}, {1: COMPUTES, 2: COMPUTES}
    for second, named in (("b (train.py:2)", False), ("a (train.py:1)", True)):
        found = given("straggler", facts(**about, whys=Whys(why, places={1: "a (train.py:1)", 2: second})))
        assert found is not None
        assert ("train.py" in found.do) == named


def test_stragglers_of_now() -> None:
    """A straggler is the first advice, whatever the averages of the whole job are."""
    found = advice_on(facts(waits={0: 0.2, 1: 0.2}, late={1: 0.42}))
    assert (found[0].rule, found[0].title) == ("straggler", "rank 1 is late and the others wait for it")
    assert found[0].because == [
        "the others wait 42% of the time for rank 1 (the comm share is lower, as a mean of all ranks)"
    ]
    assert found[0].saves_share == 0.42


def test_late_rank_first() -> None:
    """A late rank for which the others wait a tenth of the time is the first advice, whatever gain other advice promises; other advice is by gain."""
    first, *others = advice_on(facts(late={1: 0.15}, ranks=4))
    assert first.rule == "straggler"
    assert max(each.saves_share or 0.0 for each in others) > (first.saves_share or 0.0)
    gains = [each.saves_share or 0.0 for each in advice_on(facts(late={1: 0.05}, ranks=4))]
    assert gains == sorted(gains, reverse=True)


def test_rank_that_crosses_numa() -> None:
    """The rank, its GPU and the device are named; where a nearer device is there, it is what to use."""
    alone, nearer, unseen = (given("gpu_far_from_nic", about) for about in SPEAKS["gpu_far_from_nic"])
    assert alone is not None
    assert nearer is not None
    assert unseen is not None
    assert alone.title == "rank 3 reaches its NIC across NUMA nodes"
    assert alone.because == [
        "groups that span nodes take 40% of a step",
        "rank 3: GPU 0000:03:00.0 is on a different NUMA node from mlx5_0:1, which carries the traffic",
    ]
    assert "NICs" not in alone.do
    assert nearer.do.startswith("Let the job use a nearer device (mlx5_0:1): ")
    assert unseen.because[1].endswith("the nearest device")
    both = given("gpu_far_from_nic", facts(kind(local=2), network=Network([place("SYS"), place("SYS", rank=5)])))
    assert both is not None
    assert both.title == "ranks 3, 5 reach their NICs across NUMA nodes"


def test_trouble_of_a_device() -> None:
    """A fault of a device is reported with the device's name and the remedy."""
    found = given("link_errors", SPEAKS["link_errors"][0])
    assert found is not None
    assert found.because[1] == "mlx5_0:1: is not well"
    assert found.do == "Look at the cable."


def test_the_largest_gain_first() -> None:
    """Advice is sorted by gain; advice with an unknown gain comes last, but for errors."""
    about = facts(kind(curve=CURVE, dtype="float32"), bubble=0.3, pipeline=True, findings=[finding("warning")])
    found = advice_on(about)
    shares = [each.saves_share for each in found]
    known = [share for share in shares if share is not None]
    assert known == sorted(known, reverse=True)
    assert shares == [*known, None]


def test_nothing_to_say() -> None:
    """A job that communicates little gets no advice."""
    assert advice_on(facts(kind(seconds=0.002), comm=0.02, exposed=0.01)) == []
