"""The facts of a log as JSON, with the keys and counting rules of ``docs/nccl.md``."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account

#: Most pairs of ranks listed per transport.
_MOST_PAIRS = 400


def labels(account: Account) -> dict[str, Any]:
    """Return all facts of the log as JSON values, without the keys that have none."""
    found: dict[str, Any] = {
        **_text(account),
        **_versions(account),
        **_communicators(account),
        **_networks(account),
        **_transports(account),
        **_channels(account),
        **_choices(account),
        **_trouble(account),
    }
    always = ("library", "n_info", "n_warn")
    return {key: value for key, value in found.items() if value or key in always}


def _text(account: Account) -> dict[str, Any]:
    endings = "LF" if not account.n_crlf else "CRLF" if account.n_crlf == account.n_lines else "mixed"
    processes = {(process.host, process.pid) for process in account.processes}
    return {
        "line_endings": endings,
        "n_lines": account.n_lines,
        "n_info": account.levels["INFO"],
        "n_warn": account.levels["WARN"],
        "n_call": account.levels["CALL"],
        "n_lines_with_two_or_more_messages": account.n_crowded,
        "n_timestamped": account.n_timestamped,
        "prefix": dict(account.prefixes),
        "hosts": sorted({host for host, _ in processes}),
        "n_processes": len(processes),
    }


def _versions(account: Account) -> dict[str, Any]:
    versions = list(account.of(f.Version))
    builds = list(account.of(f.Build))
    is_rccl = (
        any(fact.library == "RCCL" for _, fact, _ in versions)
        or any(True for _ in account.of(f.Rccl))
        or any(fact.what != "git" for _, fact, _ in builds)
        or any(via.comm for _, via, _ in account.of(f.Via))
        or any(trees.comm for _, trees, _ in account.of(f.Trees))
    )
    says_any = bool(account.levels["INFO"] + account.levels["WARN"] + account.levels["CALL"] or versions)
    hip = {fact.hip for _, fact, _ in versions} | {fact.version for _, fact, _ in builds if fact.what == "HIP"}
    return {
        "library": "RCCL" if is_rccl else "NCCL" if says_any else "none (torch side only)",
        "nccl_version": sorted({fact.version for _, fact, _ in versions}),
        "cuda_version": sorted({fact.cuda for _, fact, _ in versions if fact.cuda}),
        "hip_version": sorted(version for version in hip if version),
        "rocm_version": sorted({fact.version for _, fact, _ in builds if fact.what == "ROCm"}),
        "version_line_count": sum(seen.lines for _, fact, seen in versions if fact.own),
        "cuda_driver_version": sorted({fact.version for _, fact, _ in account.of(f.Driver)}),
    }


def _communicators(account: Account) -> dict[str, Any]:
    comms: dict[tuple[str | None, int], dict[str, Any]] = {}
    starts = completes = 0
    for _, init, seen in account.of(f.Init):
        starts += seen.lines * init.start
        completes += seen.lines * (not init.start)
        if init.rank is None or init.nranks is None:
            continue
        key = (init.comm_id, init.nranks)
        empty: dict[str, Any] = {
            "comm_id": init.comm_id,
            "nranks": init.nranks,
            "ranks_seen": set(),
            "init_start": 0,
            "init_complete": 0,
        }
        comm = comms.setdefault(key, empty)
        comm["ranks_seen"].add(init.rank)
        comm["init_start" if init.start else "init_complete"] += seen.lines
    ends = Counter[str]()
    for _, end, seen in account.of(f.End):
        ends[end.how] += seen.lines
    layouts = {fact: None for _, fact, _ in account.of(f.Layout)}
    return {
        "comms": [{**comm, "ranks_seen": sorted(comm["ranks_seen"])} for comm in comms.values()],
        "init_start": starts,
        "init_complete": completes,
        "destroy_complete": ends["Destroy"],
        "abort_complete": ends["Abort"],
        "layout": [fact._asdict() for fact in layouts],
    }


def _networks(account: Account) -> dict[str, Any]:
    hcas = {hca[1:]: None for _, fact, _ in account.of(f.Hcas) for hca in fact.devices}
    interfaces: dict[str, set[str]] = defaultdict(set)
    for _, fact, _ in account.of(f.Interfaces):
        interfaces[fact.use].update(fact.names)
    env: dict[str, set[str]] = defaultdict(set)
    for _, setting, _ in account.of(f.Env):
        env[setting.name].add(setting.value)
    return {
        "network": sorted({fact.name for _, fact, _ in account.of(f.Network)}),
        "bootstrap_interfaces": sorted(interfaces["Bootstrap"]),
        "socket_interfaces": sorted(interfaces["NET/Socket"]),
        "hcas": [{"dev": device, "port": port, "link": link} for device, port, link in hcas],
        "env": {name: sorted(values) if len(values) > 1 else min(values) for name, values in env.items()},
    }


def _transports(account: Account) -> dict[str, Any]:
    lines = Counter[str]()
    pairs: dict[str, set[tuple[int, int]]] = defaultdict(set)
    gdr = {True: 0, False: 0}
    for _, via, seen in account.of(f.Via):
        lines[via.kind] += seen.lines
        pairs[via.kind].add((via.src, via.dst))
        if via.kind.startswith("NET/"):
            gdr[via.gdr] += seen.lines
    collnet = 0
    for _, coll, seen in account.of(f.CollNetVia):
        lines[f"COLLNET/{coll.net}"] += seen.lines
        collnet += seen.lines
    nvls = {True: 0, False: 0}
    for _, fact, seen in account.of(f.Nvls):
        nvls[fact.available] += seen.lines
    return {
        "transports": dict(lines),
        "transport_pairs": {
            kind: {"n_pairs": len(found), "pairs": [list(pair) for pair in sorted(found)[:_MOST_PAIRS]]}
            for kind, found in pairs.items()
        },
        "gdrdma": {"lines_with": gdr[True], "lines_without": gdr[False]} if any(gdr.values()) else None,
        "collnet_lines": collnet,
        "nvls_available_lines": nvls[True],
        "nvls_not_available_lines": nvls[False],
    }


def _channels(account: Account) -> dict[str, Any]:
    rings = [(fact, seen.lines) for _, fact, seen in account.of(f.Ring)]
    connected = Counter[str]()
    for _, fact, seen in account.of(f.Connected):
        connected[fact.what] += seen.lines
    counts = {fact: None for _, fact, _ in account.of(f.Channels)}
    return {
        "channels": sorted({ring.of for ring, _ in rings}),
        "ring_lines": sum(lines for _, lines in rings),
        "rings": [
            {"channel": ring.channel, "of": ring.of, "order": list(ring.order)}
            for ring in {ring: None for ring, _ in rings}
        ],
        "channel_counts": [_given(fact._asdict()) for fact in counts],
        "trees_lines": sum(seen.lines for _, _, seen in account.of(f.Trees)),
        "connected_rings": connected["all rings"],
        "connected_trees": connected["all trees"],
    }


def _choices(account: Account) -> dict[str, Any]:
    def counted(kind: type[Any]) -> list[dict[str, Any]]:
        total = Counter[Any]()
        for _, fact, seen in account.of(kind):
            total[fact] += seen.lines
        return [{**_given(fact._asdict()), "lines": lines} for fact, lines in total.items()]

    algos = counted(f.Algo)
    for entry in algos:
        entry.update({key: int(entry[key]) for key in ("algo", "proto") if entry[key].lstrip("-").isdecimal()})
    patterns = Counter[str]()
    for _, pattern, seen in account.of(f.Pattern):
        patterns[pattern.text] += seen.lines
    return {
        "algo_proto": algos,
        "collectives": [
            {"count" if key == "elements" else key: value for key, value in entry.items()} for entry in counted(f.Coll)
        ],
        "topology": counted(f.System),
        "graph_patterns": [{"text": text, "lines": lines} for text, lines in patterns.items()],
    }


def _trouble(account: Account) -> dict[str, Any]:
    dogs = Counter[f.Watchdog]()
    for _, dog, seen in account.of(f.Watchdog):
        dogs[dog._replace(where=f.Where())] += seen.lines
    warnings = Counter[tuple[str, str]]()
    for warned in account.warnings.values():
        if warned.quoted_by is None:
            warnings[warned.text, warned.kind] += warned.seen.lines
    return {
        "warnings": [{"text": text, "class": kind, "lines": lines} for (text, kind), lines in warnings.items()],
        "torch_watchdog": [
            {**_given({key: value for key, value in dog._asdict().items() if key != "where"}), "lines": lines}
            for dog, lines in dogs.items()
        ],
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
