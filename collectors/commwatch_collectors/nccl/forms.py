"""The table of line forms: needle, pattern and fact of each. A new form is one entry and its test.

Forms are searched for anywhere in a text, because many writers share a stream and cut each other's lines: a form
matches only where all that its fact needs is complete. ``docs/nccl.md`` lists the versions that print each form.

Any text may be the input, so no pattern may try a long text from many places: repetitions are bounded, or cannot begin
within a repetition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, get_type_hints

from commwatch_collectors.nccl import facts as f


class Form(NamedTuple):
    """One line form."""

    #: A text without it cannot have the form.
    needle: str
    pattern: re.Pattern[str]
    #: Makes the fact of a match; ``None`` if the match has none.
    make: Callable[[re.Match[str]], f.Fact | None]


def _int(digits: str) -> int:
    """Parse an integer of 64 bits; raise ``ValueError`` for others, which are not counters."""
    if len(digits) < 19:
        return int(digits)
    value = int(digits) if len(digits) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(digits[:32])
    return value


def _form(needle: str, pattern: str, fact: type[f.Fact], **fixed: object) -> Form:
    """Return a form whose groups are named and typed as the fact's fields; ``fixed`` sets other fields."""
    hints = get_type_hints(fact)
    read_as: dict[type, Callable[[str], object]] = {int: _int, float: float, str: str}
    kinds = {name: read_as[kind] for kind in read_as for name, hint in hints.items() if hint in (kind, kind | None)}
    compiled = re.compile(pattern, re.ASCII)
    fields: tuple[str, ...] = getattr(fact, "_fields")  # noqa: B009
    without = {**dict.fromkeys(fields), **getattr(fact, "_field_defaults"), **fixed}  # noqa: B009
    empty = [without[field] for field in fields]
    named = [(fields.index(name), group - 1, kinds[name]) for name, group in compiled.groupindex.items()]

    def make(match: re.Match[str]) -> f.Fact:
        texts, values = match.groups(), empty.copy()
        for field, group, kind in named:
            if (text := texts[group]) is not None:
                values[field] = kind(text)
        return fact(*values)

    return Form(needle, compiled, make)


def _made(needle: str, pattern: str, make: Callable[[re.Match[str]], f.Fact | None]) -> Form:
    return Form(needle, re.compile(pattern, re.ASCII), make)


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
    return f.Ring(_int(match[1]), _int(match[2]), tuple(map(_int, ranks))) if ranks else None


#: Only the name must be whole.
_INTERFACE = re.compile(r"(?<![\w.@-])([A-Za-z0-9][\w.@-]*):[0-9A-Fa-f:.]+(?:%[\w.@-]+)?(?:<\d+>|(?:<\d*)?$)", re.ASCII)


def _interfaces(match: re.Match[str]) -> f.Fact | None:
    names = tuple(dict.fromkeys(_INTERFACE.findall(match[2])))
    # Older versions list all interfaces of the bootstrap, which uses the first.
    return f.Interfaces(match[1], names[:1] if match[1] == "Bootstrap" else names) if names else None


_HCA = re.compile(r"\[(\d+)\](?:=\{([^}]{0,400})|([\w.-]+):(\d+)/(IB|RoCE)\b)", re.ASCII)
_MERGED = re.compile(r"(?<![\w.-])([\w.-]+):(\d+)/(IB|RoCE)\b", re.ASCII)


def _hcas(match: re.Match[str]) -> f.Fact | None:
    listed, complete, _ = match[1].partition("; OOB")
    devices = []
    for index, merged, device, port, link in _HCA.findall(listed):
        parts = [(device, port, link)] if device else _MERGED.findall(merged)
        devices += [f.Hca(_int(index), part[0], _int(part[1]), part[2]) for part in parts]
    if devices:
        return f.Hcas(tuple(devices))
    return f.NoHca("NET/IB : Using no device") if complete else None


def _env(match: re.Match[str]) -> f.Fact:
    return f.Env(match[1], match[2].strip().removesuffix("."))


def _version(match: re.Match[str]) -> f.Fact:
    # Before it took its own name, RCCL printed NCCL's.
    version, platform, of = match[1].rstrip(".-"), match[2], match[3]
    if platform == "hip":
        return f.Version("RCCL", version, None, of)
    return f.Version("NCCL", version, of, None, platform is not None)


_WORK = re.compile(r"\b(\w+)(?:\(ms\))?=(\[[^\]]*\]|\w+)", re.ASCII)


def _watchdog(match: re.Match[str]) -> f.Fact | None:
    work = dict(_WORK.findall(match[2]))
    if "OpType" not in work:
        return None
    seq, numel_in, numel_out, timeout = (
        _int(work[key]) if work.get(key, "").isdecimal() else None
        for key in ("SeqNum", "NumelIn", "NumelOut", "Timeout")
    )
    where = _where(match.string)
    return f.Watchdog(_int(match[1]), seq, work["OpType"], numel_in, numel_out, timeout, _int(match[3]), where)


_MARK = re.compile(r"\[rank(\d+)\]:", re.ASCII)
_SCOPE = re.compile(r"\[PG (?:ID )?(\d+)(?:\s*PG GUID ([^\s(\]]+))?", re.ASCII)


def _where(text: str) -> f.Where:
    """Return what marks and scopes show, where a text has one of them: it may hold several lines that were glued."""
    marks, scopes = set(_MARK.findall(text)), set(_SCOPE.findall(text))
    return f.Where(_int(marks.pop()) if len(marks) == 1 else None, *(scopes.pop() if len(scopes) == 1 else ()))


_PATH = re.compile(r"(GPU/[0-9a-f-]+) \(\d+/[\d.]+/(\w+)\)", re.ASCII)
_COMM = r"(?:comm (?P<comm>0x[0-9a-f]+) )?\brank (?P<rank>\d+) nranks (?P<nranks>\d+)"
_DEVICE = r"(?: cudaDev (?P<cuda_dev>\d+))?(?: nvmlDev (?P<nvml_dev>\d+))?(?: busId (?P<bus_id>[0-9a-f]+))?"
_SPLIT = (
    r"(?: parent (?P<parent>0x[0-9a-f]+))?(?: (?:splitCount|childCount) (?P<child>\d+))?"
    r"(?: color (?P<color>-?\d+))?(?: key (?P<key>-?\d+))?"
)
_ID = r"(?:[^:\[\]]{0,40}? commId (?P<comm_id>0x[0-9a-f]+))?"
_INIT = rf"(?:{_COMM}{_DEVICE}{_SPLIT}{_ID}[^:\[\]]{{0,120}}?)?- "
_GDR_GPU = (
    r"GPU Direct RDMA (Enabled|Disabled) for GPU ([\w-]+) / HCA ([\w-]+)"
    r"(?: \((distance \d+ (?:<=|>) \d+)\)| for ([^,]{1,200}))?"
)
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?(?:e[+-]?\d\d?)?"
_NET = r"([A-Za-z][\w.+-]*(?: [A-Z][\w.+-]*)*)"
_CHOICE = r"(?:(?P<collective>[A-Z]\w{0,40}): )?(?<!\d)(?P<bytes>\d+) Bytes -> "

#: Most frequent first.
FORMS: tuple[Form, ...] = (
    # transports: whole up to the kind
    _made(
        " via ",
        r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,9})(?:\[[0-9a-fA-F]+\])? -> (\d{1,9})(?:\[[0-9a-fA-F]+\])?(?: \[(send|receive)\])? via "
        r"(?:(P2P/(?:IPC|CUMEM|direct pointer|indirect|MNNVL|common device)|SHM\b|direct shared memory)"
        rf"|NET/{_NET}/(\d+)?(?:\(\d+\))?(/GDRDMA)?)"
        r"(?:/read|/CE|/direct|\(PCI\)|/Shared|/\d+\[[0-9a-fA-F]+\])*(?: comm (0x[0-9a-f]+) nRanks \d+)?",
        _via,
    ),
    _made(
        " via COLLNET/",
        rf"(?:CollNet|Coll) \d+(?:/\d+)? : (\d+)(?:\[[0-9a-fA-F]+\])? \[(send|receive)\] via COLLNET/{_NET}/(?:\d+(?:\(\d+\))?(/GDRDMA)?)?",
        lambda m: f.CollNetVia(_int(m[1]), m[2], m[3], m[4] is not None),
    ),
    # rings, trees, channels
    _made("Channel ", r"Channel (\d+)/(\d+) :((?: +\d+)+ *)(\.\.\.)?\s*$", _ring),
    _made("Ring ", r"Ring (\d+) : (-?\d+) -> (\d+) -> (-?\d+)", lambda m: f.Neighbours(*map(_int, m.groups()))),
    _made(
        "Tree ",
        r"(?<!NVLS )Tree (\d+) : (-?\d+) -> (\d+) -> (-?\d+)/(-?\d+)/(-?\d+)",
        lambda m: f.Tree(_int(m[1]), _int(m[2]), _int(m[3]), tuple(map(_int, m.group(4, 5, 6)))),
    ),
    _made(
        "Trees [",
        r"(NVLS )?Trees (\[[0-9/>|\[\] -]{0,4096})(?:comm (0x[0-9a-f]+) nRanks \d+.*)?",
        lambda m: None if m[1] else f.Trees(m[2].strip(), m[3]),
    ),
    _form(
        "coll channels",
        r"(?<!\d)(?P<coll>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
        r"(?P<p2p>\d+) p2p channels, (?P<p2p_per_peer>\d+) p2p channels per peer",
        f.Channels,
    ),
    _made(
        "Connected ", r"Connected (all rings|all trees|NVLS tree|binomial trees|CollNet)", lambda m: f.Connected(m[1])
    ),
    # calls and choices
    _form(
        "opCount",
        r"(?P<name>[A-Z]\w{0,40}): opCount [0-9a-f]+ sendbuff \S+ recvbuff \S+ count (?P<elements>\d+) datatype (?P<datatype>\d+) "
        r"op (?P<op>\d+) root (?P<root>-?\d+) (?:comm \S+(?: \[nranks=(?P<nranks>\d+)\])?)?",
        f.Coll,
    ),
    _form("Bytes -> Algo", _CHOICE + r"Algo (?P<algo>-?\d+) proto (?P<proto>-?\d+)(?=\s|$)", f.Algo),
    _form(
        "Bytes -> Algo",
        _CHOICE + r"Algo (?P<algo>[A-Za-z]\w{0,40}) proto (?P<proto>[A-Za-z]\w{0,40})"
        r" (?:channel\{Lo\.\.Hi\}=\{(?P<channel_lo>\d+)\.\.(?P<channel_hi>\d+)\}|(?!c))",
        f.Algo,
    ),
    _form(
        "Bytes -> ",
        r"(?P<collective>[A-Z]\w{0,40}) \[(?P<kind>[\w ]{1,40})\]: (?P<bytes>\d+) Bytes -> "
        r"(?:Kernel )?(?P<choice>cudaMemcpy\w*(?:<[^>]{0,80}>)?|RMA proxy \+ CE|\w+)",
        f.Kernel,
    ),
    _form("nccl", r"^\s*(?P<function>nccl[A-Z]\w*)\(", f.Call),
    # life of a communicator
    _form("- Init START", _INIT + r"Init START", f.Init, start=True),
    _form("COMPLETE", _INIT + r"(?:Init )?COMPLETE", f.Init, start=False),
    _form("COMPLETE", rf"(?:{_COMM}[^:]{{0,120}}?)?- (?P<how>Destroy|Abort|Revoke) COMPLETE", f.End),
    _form("nNodes ", r"nRanks (?P<nranks>\d+) nNodes (?P<nnodes>\d+) localRanks (?P<local_ranks>\d+)", f.Layout),
    _form(
        "Init timings",
        rf"Init timings[^:]{{0,60}}: rank (?P<rank>\d+) nranks (?P<nranks>\d+) total (?P<total_s>{_NUMBER})",
        f.InitTime,
    ),
    _form("Bootstrap timings", rf"Bootstrap timings total (?P<total_s>{_NUMBER})", f.BootstrapTime),
    # versions
    _form(
        "RCCL version",
        r"(?P<library>RCCL) version ?:? ?(?P<version>\d+\.\d+\.\d+)(?:[^\s+]{0,60}\+hip(?P<hip>\d+(?:\.\d+)*))?",
        f.Version,
    ),
    _made("NCCL version", r"\bNCCL version (\d+\.\d+\.\d+[0-9A-Za-z.-]{0,40})(?:\+(cuda|hip)(\d+\.\d+))?", _version),
    _form("NCCL git version", r"NCCL git version (?P<version>\S{1,80}(?: [0-9a-f]{7,40}\b)?)", f.Build, what="git"),
    # The continued lines of RCCL's version: only the blanks distinguish them from other output.
    _form("HIP version  : ", r"(?P<what>HIP) version  : (?P<version>\d[\d.]{0,40})", f.Build),
    _form("ROCm version : ", r"(?P<what>ROCm) version : (?P<version>\d\S{0,80})", f.Build),
    _form("Librccl path : ", r"Librccl path : (?P<version>\S{1,400})", f.Build, what="librccl"),
    _form("cudaDriverVersion", r"cudaDriverVersion (?P<version>\d+)", f.Driver),
    _made("rccl", r"\b(?:lib)?rccl\b", lambda m: f.Rccl()),
    _made("rsmi", r"\brsmi", lambda m: f.Rccl()),
    # networks
    _made("Bootstrap", r"(Bootstrap) ?: Using (.{0,4096})", _interfaces),
    _made("NET/Socket", r"(NET/Socket) ?: Using (.{0,4096})", _interfaces),
    _made("NET/IB : Using", r"NET/IB : Using\b(.*)", _hcas),
    _form("No device found", r"(?P<why>NET/IB ?: No device found)", f.NoHca),
    _form("libibverbs", r"(?P<why>Failed to open libibverbs\.so[.\d]*)", f.NoHca),
    _form(
        "NET/IB",
        r"NET/IB ?: \[\d+\] (?P<device>[\w.-]{1,64}):(?:\w{1,64}:)?(?P<port>\d+)/(?P<link>IB|RoCE)\b(?:.{0,60}? speed=(?P<speed_mbps>\d+))?",
        f.Nic,
    ),
    _form(
        "Made virtual device",
        r"Made virtual device \[\d+\] name=(?P<device>\S{1,400}) speed=(?P<speed_mbps>\d+) ndevs=\d+",
        f.Nic,
        link="merged",
    ),
    _form("Using network", r"Using network (?P<name>[A-Za-z][\w.+-]*(?: [A-Z][\w.+-]*)*)", f.Network),
    _form("elected ", r"NET/OFI [Ss]elected [Pp]rovider is (?P<name>[\w;.-]+)", f.Provider),
    _form("Loaded ", r"NET/Plugin ?: Loaded (?P<kind>\w{1,16}) plugin (?P<name>\S.{0,80}? \(v\d+\))", f.Plugin),
    _form("Assigned ", r"Assigned (?P<kind>[A-Z]{2,8}) plugin (?P<name>\S.{0,80}?) to comm", f.Plugin),
    _form("Assigned plugin", r"\b(?P<kind>[A-Z]{2,8})/Plugin: Assigned plugin (?P<name>\S.{0,80}?) type", f.Plugin),
    _form("/Plugin: Using ", r"\b(?P<kind>[A-Z]{2,8})/Plugin: Using (?P<name>\S.{0,80}? \(v\d+\))", f.Plugin),
    _form("P2P plugin", r"(?P<kind>P2P) plugin (?:v\d+ )?(?P<name>IBext\w*)", f.Plugin),
    _form("aws-ofi-nccl", r"NET/(?P<kind>OFI) Initializing (?P<name>aws-ofi-nccl \S{1,40})", f.Plugin),
    _made(
        "GPU Direct RDMA",
        r"GPU Direct RDMA (?:\([^)]{0,40}\) )?([Ee]nabled|[Dd]isabled) for HCA \w+ '([^']{0,80})'",
        lambda m: f.GdrHca(m[1].lower() == "enabled", m[2]),
    ),
    _made("GPU Direct RDMA", _GDR_GPU, lambda m: f.GdrGpu(m[1] == "Enabled", m[2], m[3], (m[4] or m[5] or "").strip())),
    _form(
        "NET/",
        r"(?P<why>NET/(?!IB|Socket)[A-Za-z]\w{0,30} .{0,200}?(?:[Dd]isabl(?:ed|ing) (?:GDR|GPUDirect)|(?:GDR|GPUDirect)(?: RDMA)?(?: support)?"
        r" (?:is )?(?:disabled|not (?:supported|available|enabled))|not support(?:ed|ing)? (?:GDR|GPUDirect|FI_HMEM)).{0,200})",
        f.GdrPlugin,
    ),
    # settings
    _made(" to", r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+) set (?:by environment )?to(?![^ ])(.{0,4096})", _env),
    _form(
        "Comm config",
        r"Comm config (?P<name>[\w ]{1,40}?) (?:set to |reset to \w{1,60}=)(?P<value>\S{1,400})",
        f.CommConfig,
    ),
    # NVLink, topology
    _made(
        "NVLS multicast",
        r"NVLS multicast support is (not )?available on dev (\d+)",
        lambda m: f.Nvls(m[1] is None, _int(m[2])),
    ),
    _made("NVLS comm", r"NVLS comm 0x[0-9a-f]+ headRank", lambda m: f.NvlsUsed()),
    _made(
        "cliqueSize",
        r"MNNVL ([01]) cliqueId \S+ cliqueSize (\d+) cliqueRank",
        lambda m: f.Mnnvl(m[1] == "1", _int(m[2])),
    ),
    _form(
        "=== System",
        rf"=== System : max(?:Bw|Width) (?P<max_bw>{_NUMBER})(?: total(?:Bw|Width) (?P<total_bw>{_NUMBER}))? =",
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
    _made(
        "-> ",
        r"(?<![\w./-])([\w./-]+\.(?:cc|cu|cpp|h|cuh):\d+)(?: \([^()]{0,200}\))? -> (\d+)\b",
        lambda m: f.Trail(m[1], _int(m[2])),
    ),
    _made(
        "retrying",
        r"(?:Call to )?connect (?:to \S{1,200} )?returned ((?:(?!connect ).){0,200}?), retrying",
        lambda m: f.Retry(m[1]),
    ),
    _made(" failure", r"(?:Cuda|CUDA|HIP) failure:? (?:\d+ )?'([^']{0,400})'", lambda m: f.CudaFailure(m[1])),
    _made(
        "RAS",
        r"RAS (declaring peer .{1,200}? as DEAD.{0,200}|[\w-]{1,40} timeout (?:warning|error).{0,200})",
        lambda m: f.RasDead(m[1].strip()),
    ),
    # PyTorch
    _made(
        "Watchdog",
        r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(([^()]{0,1000}(?:\(ms\)=\d+)?[^()]{0,200})\) ran for (\d+) milliseconds",
        _watchdog,
    ),
    _made(
        "ast enqueued",
        r"Rank (\d+)\].{0,600}?[Ll]ast enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: (-?\d+)",
        lambda m: f.Progress(_int(m[1]), _int(m[2]), _int(m[3]), _where(m.string)),
    ),
    _form(
        "NCCL error in",
        r"NCCL error in: [^\s,]{1,400}, (?P<reason>[^,(]{1,80}?)(?: \(|,|$)",
        f.TorchError,
    ),
    _form("[rank", r"\[rank(?P<rank>\d+)\]:", f.Speaks),
    _made(
        "[rank",
        r"\[rank(\d+)\]:\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.{0,200})",
        lambda m: f.Raised(_int(m[1]), m[2].strip()[:200]),
    ),
    _made(
        "lagging ranks",
        r"(ranks \[[^\]]{0,2000}\] are the lagging ranks.{0,400})",
        lambda m: f.Desync(m[1].strip()),
    ),
    _made(
        "collective #",
        r"(\[[\d, .]+\] (?:joined but didn't finish|finished) collective #\d+.{0,400})",
        lambda m: f.Desync(m[1].strip()),
    ),
    _made(
        "Detected mismatch",
        r"(Detected mismatch between collectives on ranks.{0,400})",
        lambda m: f.Desync(m[1].strip()),
    ),
)
