"""Finds faults of network devices: down, losing packets, slower than possible, congested. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from commwatch_agent.model.host_views import Complaint, NicView
from commwatch_agent.text.units import line_rate

#: Events of retransmission or link loss, and the least number within ten minutes that is a fault.
_LINK_EVENTS = {
    "link_downed": 1,
    "link_error_recovery": 1,
    "local_link_integrity_errors": 1,
    "excessive_buffer_overrun_errors": 1,
    "symbol_error": 10,
    "rx_icrc_encapsulated": 1,
    "receive_errors": 1,
    "transmit_errors": 1,
}
#: Counters of packets lost between the two ends.
_LOST = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans", "transmit_drops")
#: Faulty shares of the packets of the last ten minutes: losses (with Ethernet's drops), congestion notifications.
_TOO_MANY_LOST, _TOO_MANY_CNPS = 1e-4, 1e-2
_HARDWARE = ("ethernet", "infiniband", "roce", "rdma")
_CABLE = (
    "check the cable, the transceiver and the switch port; compare with the other end (`ibqueryerrors`, `ethtool -S`)"
)


def complaints(nics: list[NicView]) -> list[Complaint]:
    """Return all faults, device by device."""
    of_ports = {nic.netdev for nic in nics if nic.netdev is not None}
    likes: dict[tuple[str, str], list[NicView]] = defaultdict(list)
    for nic in nics:
        if nic.pci is not None and nic.pci.model is not None:
            likes[nic.kind, nic.pci.model].append(nic)
    found: list[Complaint] = []
    for nic in nics:
        like = likes[nic.kind, nic.pci.model] if nic.pci is not None and nic.pci.model is not None else []
        found += [*_errors(nic), *_lost(nic), *_congestion(nic)]
        if nic.device not in of_ports:  # its RDMA port has these faults
            found += [*_down(nic), *_slot(nic), *_slower(nic, like)]
    return found


def _down(nic: NicView) -> Iterator[Complaint]:
    """Yield a complaint if a device is down, unless it never moved a byte: then it may have no cable."""
    if nic.up is False and nic.kind in _HARDWARE and (nic.received_bytes or nic.sent_bytes):
        remedy = "check the cable and the switch; if the link was set down by hand, run `ip link set DEVICE up`"
        yield Complaint("down", nic.device, f"is {nic.state}, but has carried traffic before", remedy)


def _errors(nic: NicView) -> Iterator[Complaint]:
    lately = {name: nic.errors_lately[name] for name, least in _LINK_EVENTS.items() if _grown(nic, name) >= least}
    if lately:
        yield Complaint("errors", nic.device, f"{_events_text(lately)} within ten minutes", _CABLE)


def _lost(nic: NicView) -> Iterator[Complaint]:
    lately = {name: nic.errors_lately[name] for name in _LOST if _grown(nic, name)}
    if not lately or not nic.packets_lately or max(lately.values()) < _TOO_MANY_LOST * nic.packets_lately:
        return
    remedy = "packets are lost in transit: on RoCE, check PFC and ECN on every switch, the MTU and other traffic; on Ethernet, check the queues"
    yield Complaint(
        "errors", nic.device, f"{_events_text(lately)} of {nic.packets_lately} packets within ten minutes", remedy
    )


def _congestion(nic: NicView) -> Iterator[Complaint]:
    cnps = {name: nic.errors_lately[name] for name in ("np_cnp_sent", "rp_cnp_handled") if _grown(nic, name)}
    if cnps and nic.packets_lately and max(cnps.values()) > _TOO_MANY_CNPS * nic.packets_lately:
        remedy = "many ranks send to one: check ECN thresholds, routing (ECMP collisions), rails, and other users of this network"
        says = f"{_events_text(cnps)} of {nic.packets_lately} packets within ten minutes: senders are slowed down"
        yield Complaint("congestion", nic.device, says, remedy)


def _slot(nic: NicView) -> Iterator[Complaint]:
    """Yield a complaint if the PCI Express link is slower than the port, with the link's own limit if known."""
    pci = nic.pci
    if nic.speed is None or pci is None or pci.bandwidth is None or pci.bandwidth >= nic.speed:
        return
    says = f"{line_rate(nic.speed)} behind a PCI Express link of {pci.link} ({line_rate(pci.bandwidth)})"
    if pci.most_bandwidth is not None and pci.most_bandwidth > pci.bandwidth:
        says += f", which could be {pci.most}"
        remedy = "use a slot with all lanes, reseat the card, check the riser and the firmware settings of the slot"
    else:
        remedy = "use a slot or a card of a newer generation; until then, the slot limits the bandwidth"
    yield Complaint("slow", nic.device, says, remedy)


def _slower(nic: NicView, like: Iterable[NicView]) -> Iterator[Complaint]:
    """Yield a complaint if another device of this model runs faster."""
    fastest = max(
        (other for other in like if other.up and other.speed), key=lambda other: other.speed or 0, default=None
    )
    if nic.up and nic.speed and fastest is not None and fastest.speed and nic.speed < 0.95 * fastest.speed:
        says = f"{line_rate(nic.speed)}, while {fastest.device}, the same model, runs at {line_rate(fastest.speed)}"
        remedy = "check the cable, the transceiver and the switch port: a link that lost lanes comes up slower"
        yield Complaint("slow", nic.device, says, remedy)


def _grown(nic: NicView, name: str) -> int:
    return nic.errors_lately.get(name, 0)


def _events_text(events: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in events.items())
