"""What NCCL's logs on all nodes of a job show, as the content of one log. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

from commwatch_agent.model.nccl_views import Topology
from commwatch_collectors.nccl.views import MOST_ENTRIES, CommunicatorView
from commwatch_collectors.spans import gaps, spans


def merged_topology(found: Iterable[Topology | None]) -> Topology | None:
    """Return the topology of all nodes without findings; ``None``: no node has one."""
    every = [topology for topology in found if topology is not None]
    if len(every) < 2:
        return every[0] if every else None
    communicators: dict[tuple[object, ...], list[CommunicatorView]] = {}
    for topology in every:
        for comm in topology.communicators:
            communicators.setdefault((comm.comm_id or comm.name, comm.nranks, comm.pooled), []).append(comm)
    return replace(
        every[0],
        versions=_once(version for each in every for version in each.versions),
        env={name: value for each in reversed(every) for name, value in each.env.items()},
        hosts=[host for each in every for host in each.hosts],
        communicators=[_merged(views) for views in communicators.values()],
        choices=[choice for each in every for choice in each.choices][:MOST_ENTRIES],
        findings=[],
        files=[file for each in every for file in each.files],
        messages=sum(each.messages for each in every),
        unknown_messages=sum(each.unknown_messages for each in every),
        skipped_bytes=sum(each.skipped_bytes for each in every),
    )


def _merged(views: Sequence[CommunicatorView]) -> CommunicatorView:
    hosts: dict[str, list[int]] = {}
    for view in views:
        for host, ranks in view.hosts.items():
            hosts[host] = sorted({*hosts.get(host, ()), *ranks})
    seen = sorted({rank for ranks in hosts.values() for rank in ranks})
    missing = list(islice(chain.from_iterable(gaps(seen, views[0].nranks)), MOST_ENTRIES))
    transports: Counter[str] = Counter()
    for view in views:
        transports.update(view.transports)
    return replace(
        views[0],
        hosts=hosts,
        complete=any(view.complete for view in views),
        in_sight=spans(seen),
        missing_ranks=missing,
        transports=dict(transports),
        links=[link for view in views for link in view.links][:MOST_ENTRIES],
        rings={channel: order for view in reversed(views) for channel, order in view.rings.items()},
        group_ids=_once(group for view in views for group in view.group_ids),
    )


def _once(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
