"""Conditions on GPUs and network devices: the faults that count, each with the device that has it."""

from __future__ import annotations

import pytest

from commwatch_agent.incidents.device_rules import gpu_fault, network_fault
from tests.agent.incidents.metric_series import at_end, variants
from tests.alerts.cases import MANY, Series, gauge, series


def info(kind: str = "ethernet", device: str = "eth0", **more: str) -> Series:
    """A network device."""
    return gauge("network_info", 1, device=device, kind=kind, **more)


def counted(name: str, values: str, **labels: str) -> Series:
    """A counter of a network device."""
    return series(f"commwatch_{name}", values, **{"device": "eth0", **labels})


def errors(by: int, direction: str = "receive", **labels: str) -> Series:
    """Packets with errors, counted two minutes ago."""
    return counted("network_errors_total", f"7x{MANY - 8} {7 + by}x7", direction=direction, **labels)


@pytest.mark.parametrize(
    ("reason", "number"),
    [
        ("hardware", 1),
        ("software_thermal", 1),
        ("hardware_thermal", 1),
        ("power_brake", 1),
        ("power_cap", 0),
        ("idle", 0),
    ],
)
def test_reasons_of_throttling(reason: str, number: int) -> None:
    """Heat, power supply and hardware count, and limits that are meant do not."""
    assert len(at_end(gpu_fault, gauge("gpu_throttled", 1, gpu="0", reason=reason))) == number


def test_throttled() -> None:
    """A GPU that is throttled for more than half of five minutes is found, once for each reason."""
    reasons = ("hardware", "power_brake")
    for part, number in (("0x76 1x10", 2), ("0x77 1x9", 0), ("0x66 1x9 0x10", 0)):
        held = [series("commwatch_gpu_throttled", part, gpu="3", reason=reason) for reason in reasons]
        found = at_end(gpu_fault, *held)
        assert [(one.subject, one.value > 0.5) for one in found] == [
            (("3", "throttled", reason), True) for reason in reasons
        ][:number]
        assert len({one.key for one in found}) == number
    (whole,) = at_end(gpu_fault, gauge("gpu_throttled", 1, gpu="3", reason="power_brake"))
    assert whole.says == "GPU 3 was throttled for 100% of the last five minutes because of power brake"
    assert dict(whole.labels) == {"instance": "a:9477", "gpu": "3", "reason": "power_brake"}


@pytest.mark.parametrize(
    ("xid", "number"), [("48", 1), ("79", 1), ("144", 1), ("149", 1), ("150", 1), ("13", 0), ("31", 0), ("14", 0)]
)
def test_xids(xid: str, number: int) -> None:
    """Xids of hardware count, and those that programs cause do not."""
    assert len(at_end(gpu_fault, gauge("gpu_xid_errors_total", 1, gpu="0", xid=xid))) == number


def test_first_xid() -> None:
    """The first Xid is found at once, although its counter begins with it, and two of one GPU are two."""
    first = series("commwatch_gpu_xid_errors_total", f"_x{MANY} 1", gpu="0", xid="79")
    other = gauge("gpu_xid_errors_total", 3, gpu="0", xid="48")
    found = at_end(gpu_fault, other, first)
    assert [(one.subject, one.value) for one in found] == [(("0", "xid", "48"), 3), (("0", "xid", "79"), 1)]
    assert found[0].says.endswith("reports Xid 48, an error of hardware: 3 times since the agent started")


def test_lost_and_back() -> None:
    """A GPU is lost as long as it does not respond; one that never was there is not."""
    lost, back = (series("commwatch_gpu_up", values, gpu="0") for values in ("1x5 0", "1x5 0x5 1"))
    (found,) = at_end(gpu_fault, lost)
    assert (found.variant, found.subject, found.says) == ("lost", ("0", "lost"), "GPU 0 no longer responds")
    assert at_end(gpu_fault, back) == []
    assert at_end(gpu_fault, series("commwatch_gpu_up", "0x5 stale", gpu="0")) == []


def test_throttled_at_the_threshold() -> None:
    """A GPU that is throttled for exactly the threshold is not found."""
    assert at_end(gpu_fault, gauge("gpu_throttled", 0.5, gpu="3", reason="hardware")) == []


def test_ecc() -> None:
    """Errors that could not be corrected count, from the first one."""
    both = gauge("gpu_ecc_errors_total", 1, gpu="1", type="uncorrected")
    both |= gauge("gpu_ecc_errors_total", 900, gpu="0", type="corrected")
    (found,) = at_end(gpu_fault, both)
    assert (found.subject, found.value) == (("1", "ecc"), 1)
    assert "had 1 memory error that" in found.says


def test_gpus_of_two_nodes() -> None:
    """GPUs of one index on two nodes are judged each by itself, and named with their node."""
    up, lost = gauge("gpu_up", 1, gpu="0"), gauge("gpu_up", 0, gpu="0", instance="b:9477")
    assert [(one.nodes, one.labels["instance"]) for one in at_end(gpu_fault, up, lost)] == [(("b",), "b:9477")]


def test_network_errors() -> None:
    """Errors in both directions add up, of devices that are no virtual ones."""
    both = errors(6) | errors(6, "transmit")
    (found,) = at_end(network_fault, both, info())
    assert (found.variant, found.subject, found.value, found.nodes) == ("errors", ("eth0", "errors"), 12, ("a",))
    assert found.says == "network device eth0 had 12 packets with errors in the last five minutes"
    assert at_end(network_fault, errors(10), info()) == []
    assert at_end(network_fault, both, info("virtual")) == []
    assert at_end(network_fault, both) == []


def test_errors_of_two_nodes() -> None:
    """Errors of devices with one name on two nodes do not add up, and one being virtual says nothing of the other."""
    here, there = errors(8), errors(8, instance="b:9477")
    assert at_end(network_fault, here, there, info(), info(instance="b:9477")) == []
    found = at_end(network_fault, errors(11), errors(11, instance="b:9477"), info(), info("virtual", instance="b:9477"))
    assert [one.nodes for one in found] == [("a",)]


def test_old_errors() -> None:
    """Errors count for five minutes, and a counter that begins again counts from 0."""
    old = counted("network_errors_total", "7x20 99x20", direction="receive")
    assert at_end(network_fault, old, dict.fromkeys(info(), "1x41")) == []
    reset = counted("network_errors_total", f"5000x{MANY - 8} 0x3 11x3", direction="receive")
    assert [one.value for one in at_end(network_fault, reset, info())] == [11]


@pytest.mark.parametrize(
    ("event", "number"),
    [("symbol_error", 1), ("local_ack_timeout_err", 1), ("np_cnp_sent", 0), ("rx_read_requests", 0)],
)
def test_rdma_errors(event: str, number: int) -> None:
    """Errors and lost packets of an RDMA port count, and signs of congestion do not."""
    events = counted("infiniband_events_total", f"0x{MANY - 8} 11x7", device="mlx5_0:1", event=event)
    found = at_end(network_fault, events)
    assert variants(found) == ["rdma_errors"] * number
    assert all(one.says == "RDMA port mlx5_0:1 counted 11 errors in the last five minutes" for one in found)


def test_rdma_errors_add_up() -> None:
    """Errors of several kinds add up to those of the port."""
    names = ("symbol_error", "rnr_nak_retry_err")
    events = [counted("infiniband_events_total", f"0x{MANY - 8} 6x7", event=name) for name in names]
    assert [one.value for one in at_end(network_fault, *events)] == [12]
    assert at_end(network_fault, *events, link_errors=12) == []


def test_lost_link() -> None:
    """A link that was lost once in five minutes is found, also beside errors of the same device."""
    down = counted("network_link_downs_total", f"0x{MANY - 8} 1x7")
    found = at_end(network_fault, down, errors(20), info())
    assert variants(found) == ["errors", "link_down"]
    assert len({one.key for one in found}) == 2
    assert found[1].says == "network device eth0 lost its link 1 time in the last five minutes"
    assert at_end(network_fault, down) == []
