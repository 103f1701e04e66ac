"""Rules on faults of GPUs and network devices. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.metric_conditions import DEVICE, GPU, Name, condition
from commwatch_agent.incidents.metric_window import MetricWindow, by, where
from commwatch_agent.text.units import counted, percent

#: Without the power limit: a GPU at its limit is under full load, which is not a fault.
_THROTTLED_BY = ("hardware", "software_thermal", "hardware_thermal", "power_brake")
#: Errors of hardware, not of programs.
_XIDS = frozenset(
    map(str, (48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 121, 140, 143, 144, 145, 146, 147, 148, 149, 150))
)
#: Errors and lost packets; not congestion, which is normal under load.
_RDMA_ERRORS = (
    "symbol_error", "link_error_recovery", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "rx_icrc_encapsulated",
    "local_ack_timeout_err", "rnr_nak_retry_err",
)  # fmt: skip
#: By variant.
_METRICS = {
    "throttled": Name.GPU_THROTTLED,
    "xid": Name.GPU_XID,
    "lost": Name.GPU_UP,
    "ecc": Name.GPU_ECC,
    "errors": Name.NETWORK_ERRORS,
    "rdma_errors": Name.RDMA_EVENTS,
    "link_down": Name.LINK_DOWNS,
}


def gpu_fault(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """GPUs that are throttled, report errors of hardware, or no longer respond.

    The counters of Xids and ECC errors count as they are: an increase would miss the first error, because the series begins with it. Such errors
    need a reset of the GPU, for which the agent must be stopped, so the counter starts again at 0.
    """
    throttled = where(window.mean(Name.GPU_THROTTLED), "reason", _THROTTLED_BY.__contains__)
    for labels, part in by(throttled, [*GPU, "reason"], max).items():
        if part > thresholds["gpu_throttled"]:
            there = dict(labels)
            says = f"was throttled for {percent(part)} of the last five minutes because of {there['reason'].replace('_', ' ')}"
            yield _gpu("throttled", there, part, says, now_s, there["reason"])
    xids = where(window.latest(Name.GPU_XID), "xid", _XIDS.__contains__)
    for labels, number in by(xids, [*GPU, "xid"], max).items():
        there = dict(labels)
        times = counted(round(number), "time")
        says = f"reports Xid {there['xid']}, an error of hardware: {times} since the agent started"
        yield _gpu("xid", there, number, says, now_s, there["xid"])
    for labels, up in by(window.latest(Name.GPU_UP), GPU, max).items():
        if up == 0:
            yield _gpu("lost", dict(labels), up, "no longer responds", now_s)
    uncorrected = where(window.latest(Name.GPU_ECC), "type", "uncorrected".__eq__)
    for labels, number in by(uncorrected, GPU, max).items():
        if number > 0:
            says = f"has had {counted(round(number), 'memory error')} that ECC could not correct since its driver was loaded"
            yield _gpu("ecc", dict(labels), number, says, now_s)


def _gpu(variant: str, labels: Mapping[str, str], value: float, says: str, now_s: float, *more: str) -> Condition:
    gpu = labels.get("gpu", "")
    return condition(
        "gpu_fault",
        (gpu, variant, *more),
        labels,
        now_s=now_s,
        value=value,
        variant=variant,
        says=f"GPU {gpu} {says}",
        source="gpu",
        metric=_METRICS[variant],
        measured=f"GPU {gpu} {says}",
    )


def network_fault(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Network devices with errors, and those that lost their link, in the last five minutes. Not virtual ones, which have no cable."""
    infos = where(window.latest(Name.NETWORK_INFO), "kind", lambda kind: kind != "virtual")
    real, most = by(infos, DEVICE, max), thresholds["link_errors"]
    packets = by(by(window.increase(Name.NETWORK_ERRORS), [*DEVICE, "direction"], max), DEVICE, sum)
    for labels, number in packets.items():
        if labels in real and number > most:
            yield _device("errors", dict(labels), number, f"had {counted(round(number), 'packet')} with errors", now_s)
    events = where(window.increase(Name.RDMA_EVENTS), "event", _RDMA_ERRORS.__contains__)
    for labels, number in by(by(events, [*DEVICE, "event"], max), DEVICE, sum).items():
        if number > most:
            yield _device("rdma_errors", dict(labels), number, f"counted {counted(round(number), 'error')}", now_s)
    for labels, number in by(window.increase(Name.LINK_DOWNS), DEVICE, sum).items():
        if labels in real and number > 0:
            yield _device("link_down", dict(labels), number, f"lost its link {counted(round(number), 'time')}", now_s)


def _device(variant: str, labels: Mapping[str, str], number: float, what: str, now_s: float) -> Condition:
    device = labels.get("device", "")
    return condition(
        "network_fault",
        (device, variant),
        labels,
        now_s=now_s,
        value=number,
        variant=variant,
        says=f"{'RDMA port' if variant == 'rdma_errors' else 'network device'} {device} {what} in the last five minutes",
        source="host",
        metric=_METRICS[variant],
        measured=f"{number:.0f} in five minutes",
    )
