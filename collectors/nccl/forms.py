"""The table of line forms: what tells one, what it looks like, what it says. A new form is one line here and its test.

Forms are searched for anywhere in a text, because many writers share a stream and cut each other's lines: a form
matches only where all that its fact needs is whole. ``docs/nccl.md`` says which versions print which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, get_type_hints

from commwatch.collectors.nccl import facts as f


class Form(NamedTuple):
    """One line form."""

    #: A text without it cannot have the form.
    needle: str
    pattern: re.Pattern[str]
    #: Makes the fact of a match; ``None`` where it is none after all.
    make: Callable[[re.Match[str]], f.Fact | None]


def _form(needle: str, pattern: str, fact: type[f.Fact], **fixed: object) -> Form:
    """A form whose groups are named as the fact's fields, and are of their types; ``fixed`` are the rest."""
    hints = get_type_hints(fact)
    kinds = {name: kind for kind in (int, float, str) for name, hint in hints.items() if hint in (kind, kind | None)}
    compiled = re.compile(pattern)
    named = [(name, kinds[name]) for name in compiled.groupindex]

    def make(match: re.Match[str]) -> f.Fact:
        values = {name: kind(match[name]) for name, kind in named if match[name] is not None}
        return fact(**{**dict.fromkeys(hints), **getattr(fact, "_field_defaults"), **fixed, **values})  # noqa: B009

    return Form(needle, compiled, make)


def _made(needle: str, pattern: str, make: Callable[[re.Match[str]], f.Fact | None]) -> Form:
    return Form(needle, re.compile(pattern), make)


# -- forms that need more than their groups -------------------------------------------------------


_SHARED = {"direct shared memory": "SHM"}


def _via(match: re.Match[str]) -> f.Fact:
    src, dst, direction, fixed, net, device, gdr, comm = match.groups()
    kind = f"NET/{net}" if net is not None else _SHARED.get(fixed, fixed)
    return f.Via(int(src), int(dst), direction or "", kind, device, gdr is not None, comm)


def _ring(match: re.Match[str]) -> f.Fact | None:
    ranks, cut = match[3].split(), match[4]
    if cut and not match[3].endswith(" "):
        ranks.pop()  # the dots may have cut it
    return f.Ring(int(match[1]), int(match[2]), tuple(map(int, ranks))) if ranks else None


_INTERFACE = re.compile(r"([A-Za-z0-9][\w.@-]*):[0-9A-Fa-f:.]+(?:%[\w.@-]+)?<\d+>")


def _interfaces(match: re.Match[str]) -> f.Fact | None:
    names = tuple(dict.fromkeys(_INTERFACE.findall(match[2])))
    # The bootstrap used to list all there are; it uses the first.
    return f.Interfaces(match[1], names[:1] if match[1] == "Bootstrap" else names) if names else None


_HCA = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}?|([\w.-]+):(\d+)/(IB|RoCE)\b)")
_MERGED = re.compile(r"([\w.-]+):(\d+)/(IB|RoCE)\b")


def _hcas(match: re.Match[str]) -> f.Fact:
    devices = []
    for index, merged, device, port, link in _HCA.findall(match[1]):
        parts = [(device, port, link)] if device else _MERGED.findall(merged)
        devices += [f.Hca(int(index), part[0], int(part[1]), part[2]) for part in parts]
    return f.Hcas(tuple(devices)) if devices else f.NoHca(match[0].strip())


def _env(match: re.Match[str]) -> f.Fact:
    return f.Env(match[1], match[2].strip().removesuffix("."))


_WORK = re.compile(r"(\w+)(?:\(ms\))?=(\[[^\]]*\]|\w+)")


def _watchdog(match: re.Match[str]) -> f.Fact | None:
    work = dict(_WORK.findall(match[2]))
    if "OpType" not in work:
        return None
    seq, numel_in, numel_out, timeout = (
        int(work[key]) if work.get(key, "").isdecimal() else None
        for key in ("SeqNum", "NumelIn", "NumelOut", "Timeout")
    )
    return f.Watchdog(int(match[1]), seq, work["OpType"], numel_in, numel_out, timeout, int(match[3]))


_PATH = re.compile(r"(GPU/[0-9a-f-]+) \(\d+/[\d.]+/(\w+)\)")
_COMM = r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) nranks (?P<nranks>\d+)"
_DEVICE = r"(?: cudaDev (?P<cuda_dev>\d+))?(?: nvmlDev (?P<nvml_dev>\d+))?(?: busId (?P<bus_id>[0-9a-f]+))?"
_SPLIT = (
    r"(?: parent (?P<parent>0x[0-9a-f]+))?(?: (?:splitCount|childCount) (?P<child>\d+))?"
    r"(?: color (?P<color>-?\d+))?(?: key (?P<key>-?\d+))?"
)
_INIT = rf"(?:{_COMM}{_DEVICE}{_SPLIT}(?:[^:\[\]]*? commId (?P<comm_id>0x[0-9a-f]+))?[^:\[\]]*?)?- (?:Init )?"
_GDR_GPU = (
    r"GPU Direct RDMA (Enabled|Disabled) for GPU (\w+) / HCA (\w+)(?: \((distance \d+ (?:<=|>) \d+)\)| for ([^,]+))?"
)
_NUMBER = r"[\d.]+(?:e[+-]?\d+)?"

#: Most frequent first.
FORMS: tuple[Form, ...] = (
    # transports
    _made(
        " via ",
        r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])? via "
        r"(?:(P2P/(?:IPC|CUMEM|direct pointer|indirect|MNNVL|common device)|SHM\b|direct shared memory)"
        r"|NET/([^/\s](?:[^/]*[^/\s])?)/(\d+)(?:\(\d+\))?(/GDRDMA)?)"
        r"(?:/read|/CE|/direct|\(PCI\)|/Shared)*(?:.*? comm (0x[0-9a-f]+) nRanks \d+)?",
        _via,
    ),
    _made(
        " via COLLNET/",
        r"(?:CollNet|Coll) \d+(?:/\d+)? : (\d+)(?:\[[0-9a-fA-F]+\])? \[(send|receive)\] via COLLNET/([^/\s](?:[^/]*[^/\s])?)/\d+(?:\(\d+\))?(/GDRDMA)?",
        lambda m: f.CollNetVia(int(m[1]), m[2], m[3], m[4] is not None),
    ),
    # rings, trees, channels
    _made("Channel ", r"Channel (\d+)/(\d+) :((?: +\d+)+ *)(\.\.\.)?\s*$", _ring),
    _made("Ring ", r"Ring (\d+) : (-?\d+) -> (\d+) -> (-?\d+)", lambda m: f.Neighbours(*map(int, m.groups()))),
    _made(
        "Trees [",
        r"(NVLS )?Trees (\[.*?)(?: comm (0x[0-9a-f]+) nRanks \d+.*)?$",
        lambda m: None if m[1] else f.Trees(m[2].strip(), m[3]),
    ),
    _form(
        "coll channels",
        r"(?P<coll>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
        r"(?P<p2p>\d+) p2p channels, (?P<p2p_per_peer>\d+) p2p channels per peer",
        f.Channels,
    ),
    _made(
        "Connected ", r"Connected (all rings|all trees|NVLS tree|binomial trees|CollNet)", lambda m: f.Connected(m[1])
    ),
    # calls and choices
    _form(
        "opCount",
        r"(?P<name>[A-Z]\w*): opCount [0-9a-f]+ sendbuff \S+ recvbuff \S+ count (?P<elements>\d+) datatype (?P<datatype>\d+) "
        r"op (?P<op>\d+) root (?P<root>-?\d+) comm \S+(?: \[nranks=(?P<nranks>\d+)\])?",
        f.Coll,
    ),
    _form(
        "Bytes -> Algo",
        r"(?:(?P<collective>[A-Z]\w*): )?(?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)"
        r"(?:.*?channel\{Lo\.\.Hi\}=\{(?P<channel_lo>\d+)\.\.(?P<channel_hi>\d+)\})?",
        f.Algo,
    ),
    _form(
        "Bytes -> ",
        r"(?P<collective>[A-Z]\w*) \[(?P<kind>[\w ]+)\]: (?P<bytes>\d+) Bytes -> (?:Kernel )?(?P<choice>cudaMemcpy\w*(?:<[^>]*>)?|RMA proxy \+ CE|\w+)",
        f.Kernel,
    ),
    _form("nccl", r"^\s*(?P<function>nccl[A-Z]\w*)\(", f.Call),
    # life of a communicator
    _form("- Init START", _INIT + r"START", f.Init, start=True),
    _form("COMPLETE", _INIT + r"COMPLETE", f.Init, start=False),
    _form("COMPLETE", rf"(?:{_COMM}[^:]*?)?- (?P<how>Destroy|Abort|Revoke) COMPLETE", f.End),
    _form(
        "nNodes ", r"rank \d+ nRanks (?P<nranks>\d+) nNodes (?P<nnodes>\d+) localRanks (?P<local_ranks>\d+)", f.Layout
    ),
    _form(
        "Init timings",
        r"Init timings.*?: rank (?P<rank>\d+) nranks (?P<nranks>\d+) total (?P<total_s>[\d.]+)",
        f.InitTime,
    ),
    # versions
    _form(
        "RCCL version",
        r"(?P<library>RCCL) version ?:? ?(?P<version>\d+\.\d+\.\d+)(?:[^\s+]*\+hip(?P<hip>\d[\d.]*))?",
        f.Version,
    ),
    _made(
        "NCCL version",
        r"\b(NCCL) version (\d+\.\d+\.\d+[0-9A-Za-z.-]*)(?:\+cuda(\d+\.\d+))?",
        lambda m: f.Version(m[1], m[2].rstrip(".-"), m[3], None, m[3] is not None),
    ),
    _form("HIP version", r"(?P<what>HIP) version *: *(?P<version>\d[\d.]*)", f.Build),
    _form("ROCm version", r"(?P<what>ROCm) version *: *(?P<version>\d\S*)", f.Build),
    _form("cudaDriverVersion", r"cudaDriverVersion (?P<version>\d+)", f.Driver),
    _made("rccl", r"\b(?:lib)?rccl\b", lambda m: f.Rccl()),
    _made("rsmi", r"rsmi", lambda m: f.Rccl()),
    # networks
    _made("Bootstrap", r"(Bootstrap) ?: Using (.*)", _interfaces),
    _made("NET/Socket", r"(NET/Socket) ?: Using (.*)", _interfaces),
    _made("NET/IB : Using", r"NET/IB : Using\b(.*?)(?:; OOB.*)?$", _hcas),
    _form("No device found", r"(?P<why>NET/IB : No device found)", f.NoHca),
    _form("libibverbs", r"(?P<why>Failed to open libibverbs\.so\S*)", f.NoHca),
    _form("Using network", r"Using network (?P<name>[A-Za-z][\w.+-]*(?: [A-Z][\w.+-]*)*)", f.Network),
    _form("elected ", r"NET/OFI [Ss]elected [Pp]rovider is (?P<name>[\w;.-]+)", f.Provider),
    _made(
        "GPU Direct RDMA",
        r"GPU Direct RDMA (?:\([^)]*\) )?([Ee]nabled|[Dd]isabled) for HCA \w+ '([^']*)'",
        lambda m: f.GdrHca(m[1].lower() == "enabled", m[2]),
    ),
    _made("GPU Direct RDMA", _GDR_GPU, lambda m: f.GdrGpu(m[1] == "Enabled", m[2], m[3], m[4] or m[5] or "")),
    _made(" to ", r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+) set (?:by environment )?to\b(.*)", _env),
    # NVLink, topology
    _made(
        "NVLS multicast",
        r"NVLS multicast support is (not )?available on dev (\d+)",
        lambda m: f.Nvls(m[1] is None, int(m[2])),
    ),
    _made("NVLS comm", r"NVLS comm 0x[0-9a-f]+ headRank", lambda m: f.NvlsUsed()),
    _form(
        "=== System",
        rf"=== System : max(?:Bw|Width) (?P<max_bw>{_NUMBER})(?: total(?:Bw|Width) (?P<total_bw>{_NUMBER}))?",
        f.System,
    ),
    _made(" :GPU/", r"(GPU/[0-9a-f-]+) :(?=GPU/)(.*)", lambda m: f.Paths(m[1], tuple(_PATH.findall(m[2])))),
    _form(
        "Pattern ",
        rf"(?P<text>Pattern (?P<pattern>\d+), crossNic \d+, nChannels (?P<nchannels>\d+), (?:bw|speed) (?P<bw_intra>{_NUMBER})/(?P<bw_inter>{_NUMBER}), "
        r"(?:nvlink \d+, )?(?:type (?P<type_intra>\w+)(?:/(?P<type_inter>\w+))?, )?sameChannels \d+)",
        f.Pattern,
    ),
    # errors that are no WARN
    _made("-> ", r"([\w./-]+\.(?:cc|cu|cpp|h|cuh):\d+)(?: \([^()]*\))? -> (\d+)\b", lambda m: f.Trail(m[1], int(m[2]))),
    _made("retrying", r"(?:Call to )?connect (?:to \S+ )?returned (.*?), retrying", lambda m: f.Retry(m[1])),
    _made(" failure", r"(?:Cuda|HIP) failure (?:\d+ )?'([^']*)'", lambda m: f.CudaFailure(m[1])),
    _made(
        "RAS",
        r"RAS (declaring peer .* as DEAD.*|(?:\w|-)+ timeout (?:warning|error).*)",
        lambda m: f.RasDead(m[1].strip()),
    ),
    # PyTorch
    _made(
        "Watchdog",
        r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\((.*?)\) ran for (\d+) milliseconds",
        _watchdog,
    ),
    _made(
        "ast enqueued",
        r"Rank (\d+)\].*?[Ll]ast enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: (-?\d+)",
        lambda m: f.Progress(*map(int, m.groups())),
    ),
    _made(
        "rror",
        r"\[rank(\d+)\]:\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)",
        lambda m: f.Raised(int(m[1]), m[2].strip()[:200]),
    ),
    _form("[rank", r"\[rank(?P<rank>\d+)\]:", f.Speaks),
    _made("lagging ranks", r"(ranks \[[^\]]*\] are the lagging ranks.*)", lambda m: f.Desync(m[1].strip())),
    _made(
        "collective #",
        r"(\[[\d, .]+\] (?:joined but didn't finish|finished) collective #\d+.*)",
        lambda m: f.Desync(m[1].strip()),
    ),
    _made("Detected mismatch", r"(Detected mismatch between collectives on ranks.*)", lambda m: f.Desync(m[1].strip())),
)

#: How known messages begin that carry nothing we keep: plumbing, allocation, plug-ins that were looked for.
_QUIET = re.compile(
    r"\s*(?:NCCL git version|NET/Plugin|P2P plugin|Plugin Path|(?:TUNER|PROFILER|ENV|GIN|NET)/Plugin|TUNER/|Comm config|P2P Chunksize"
    r"|threadThresholds|Setting affinity|Launch mode|Using non-device net|Using internal|DMA-BUF is|PXN Disabled|MNNVL|NVLS"
    r"|CC O|Connect(?:ed|ion) to proxy|New proxy|Allocated|Imported|UDS|\[?Proxy|proxy|ncclPoll|ncclProxy|ncclTopo|resp\.opId|Received and"
    r"|(?:send|recv)Connect|Queuing|Dequeued|[Ss]harp rank|SHARP rank|RAS |TOPO/|TUNER|Retrieving state|Initialized|Assigned|Loading|Loaded|Successfully loaded"
    r"|Check P2P|Bootstrap timings|Mem Realloc|Latency/|Algorithm|Protocol|Max NThreads|Function|(?:Broadcast|Reduce|AllGather|ReduceScatter|AllReduce) \|"
    r"|=+$|\+ |CPU/|GPU/|NET/|PCI/|NIC/|NVS/|\d+ : |Search |Ring \d|NVLS Head|\S+:\d+ (?:Cuda|memory|NCCL)|comm 0x|Enabled NCCL|DMABUF|Dmabuf|dlvsym|dlopen"
    r"|Kernel version|ROCr version|HSA|initialized internal|Hostname|Librccl|\[node_id|Enabled GDRCopy|Trees|NVLink|includes? |Pattern)"
)


@lru_cache(maxsize=16_384)
def read(text: str) -> tuple[f.Fact, ...]:
    """The facts in ``text``; none where no form is whole in it."""
    found: list[f.Fact] = []
    length = len(text.rstrip())
    for form in FORMS:
        if form.needle in text:
            for match in form.pattern.finditer(text):
                fact = form.make(match)
                if fact is not None:
                    found.append(fact)
                    if match.start() == 0 and match.end() >= length:
                        return tuple(found)  # there is room for nothing else
    return tuple(found)


def is_quiet(text: str) -> bool:
    """Whether a message without a fact is known to have none."""
    return _QUIET.match(text) is not None
