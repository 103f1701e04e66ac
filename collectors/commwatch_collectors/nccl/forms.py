"""The table of line forms: needle, pattern and fact of each. A new form is one entry and its test.

Forms are searched for anywhere in a text, because many writers share a stream and cut each other's lines: a form
matches only where all that its fact needs is complete. ``docs/nccl.md`` lists the versions that print each form.

Any text may be the input, so no pattern may try a long text from many places: repetitions are bounded, or cannot begin
within a repetition.
"""

from __future__ import annotations

import re

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside import frameworks, system, torch
from commwatch_collectors.nccl.beside.form import Form, form, integer, made

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
    return f.Ring(integer(match[1]), integer(match[2]), tuple(map(integer, ranks))) if ranks else None


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
        devices += [f.Hca(integer(index), part[0], integer(part[1]), part[2]) for part in parts]
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
    made(
        " via ",
        r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,9})(?:\[[0-9a-fA-F]+\])? -> (\d{1,9})(?:\[[0-9a-fA-F]+\])?(?: \[(send|receive)\])? via "
        r"(?:(P2P/(?:IPC|CUMEM|direct pointer|indirect|MNNVL|common device)|SHM\b|direct shared memory)"
        rf"|NET/{_NET}/(\d+)?(?:\(\d+\))?(/GDRDMA)?)"
        r"(?:/read|/CE|/direct|\(PCI\)|/Shared|/\d+\[[0-9a-fA-F]+\])*(?: comm (0x[0-9a-f]+) nRanks \d+)?",
        _via,
    ),
    made(
        " via COLLNET/",
        rf"(?:CollNet|Coll) \d+(?:/\d+)? : (\d+)(?:\[[0-9a-fA-F]+\])? \[(send|receive)\] via COLLNET/{_NET}/(?:\d+(?:\(\d+\))?(/GDRDMA)?)?",
        lambda m: f.CollNetVia(integer(m[1]), m[2], m[3], m[4] is not None),
    ),
    # rings, trees, channels
    made("Channel ", r"Channel (\d+)/(\d+) :((?: +\d+)+ *)(\.\.\.)?\s*$", _ring),
    made("Ring ", r"Ring (\d+) : (-?\d+) -> (\d+) -> (-?\d+)", lambda m: f.Neighbours(*map(integer, m.groups()))),
    made(
        "Tree ",
        r"(?<!NVLS )Tree (\d+) : (-?\d+) -> (\d+) -> (-?\d+)/(-?\d+)/(-?\d+)",
        lambda m: f.Tree(integer(m[1]), integer(m[2]), integer(m[3]), tuple(map(integer, m.group(4, 5, 6)))),
    ),
    made(
        "Trees [",
        r"(NVLS )?Trees (\[[0-9/>|\[\] -]{0,4096})(?:comm (0x[0-9a-f]+) nRanks \d+.*)?",
        lambda m: None if m[1] else f.Trees(m[2].strip(), m[3]),
    ),
    form(
        "coll channels",
        r"(?<!\d)(?P<coll>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
        r"(?P<p2p>\d+) p2p channels, (?P<p2p_per_peer>\d+) p2p channels per peer",
        f.Channels,
    ),
    made(
        "Connected ", r"Connected (all rings|all trees|NVLS tree|binomial trees|CollNet)", lambda m: f.Connected(m[1])
    ),
    # calls and choices
    form(
        "opCount",
        r"(?P<name>[A-Z]\w{0,40}): opCount [0-9a-f]+ sendbuff \S+ recvbuff \S+ count (?P<elements>\d+) datatype (?P<datatype>\d+) "
        r"op (?P<op>\d+) root (?P<root>-?\d+) (?:comm \S+(?: \[nranks=(?P<nranks>\d+)\])?)?",
        f.Coll,
    ),
    form("Bytes -> Algo", _CHOICE + r"Algo (?P<algo>-?\d+) proto (?P<proto>-?\d+)(?=\s|$)", f.Algo),
    form(
        "Bytes -> Algo",
        _CHOICE + r"Algo (?P<algo>[A-Za-z]\w{0,40}) proto (?P<proto>[A-Za-z]\w{0,40})"
        r" (?:channel\{Lo\.\.Hi\}=\{(?P<channel_lo>\d+)\.\.(?P<channel_hi>\d+)\}|(?!c))",
        f.Algo,
    ),
    form(
        "Bytes -> ",
        r"(?P<collective>[A-Z]\w{0,40}) \[(?P<kind>[\w ]{1,40})\]: (?P<bytes>\d+) Bytes -> "
        r"(?:Kernel )?(?P<choice>cudaMemcpy\w*(?:<[^>]{0,80}>)?|RMA proxy \+ CE|\w+)",
        f.Kernel,
    ),
    form("nccl", r"^\s*(?P<function>nccl[A-Z]\w*)\(", f.Call),
    # life of a communicator
    form("- Init START", _INIT + r"Init START", f.Init, start=True),
    form("COMPLETE", _INIT + r"(?:Init )?COMPLETE", f.Init, start=False),
    form("COMPLETE", rf"(?:{_COMM}[^:]{{0,120}}?)?- (?P<how>Destroy|Abort|Revoke) COMPLETE", f.End),
    form("nNodes ", r"nRanks (?P<nranks>\d+) nNodes (?P<nnodes>\d+) localRanks (?P<local_ranks>\d+)", f.Layout),
    form(
        "Init timings",
        rf"Init timings[^:]{{0,60}}: rank (?P<rank>\d+) nranks (?P<nranks>\d+) total (?P<total_s>{_NUMBER})",
        f.InitTime,
    ),
    form("Bootstrap timings", rf"Bootstrap timings total (?P<total_s>{_NUMBER})", f.BootstrapTime),
    # versions
    form(
        "RCCL version",
        r"(?P<library>RCCL) version ?:? ?(?P<version>\d+\.\d+\.\d+)(?:[^\s+]{0,60}\+hip(?P<hip>\d+(?:\.\d+)*))?",
        f.Version,
    ),
    made("NCCL version", r"\bNCCL version (\d+\.\d+\.\d+[0-9A-Za-z.-]{0,40})(?:\+(cuda|hip)(\d+\.\d+))?", _version),
    form("NCCL git version", r"NCCL git version (?P<version>\S{1,80}(?: [0-9a-f]{7,40}\b)?)", f.Build, what="git"),
    # The continued lines of RCCL's version: only the blanks distinguish them from other output.
    form("HIP version  : ", r"(?P<what>HIP) version  : (?P<version>\d[\d.]{0,40})", f.Build),
    form("ROCm version : ", r"(?P<what>ROCm) version : (?P<version>\d\S{0,80})", f.Build),
    form("Librccl path : ", r"Librccl path : (?P<version>\S{1,400})", f.Build, what="librccl"),
    form("cudaDriverVersion", r"cudaDriverVersion (?P<version>\d+)", f.Driver),
    made("rccl", r"\b(?:lib)?rccl\b", lambda m: f.Rccl()),
    made("rsmi", r"\brsmi", lambda m: f.Rccl()),
    # networks
    made("Bootstrap", r"(Bootstrap) ?: Using (.{0,4096})", _interfaces),
    made("NET/Socket", r"(NET/Socket) ?: Using (.{0,4096})", _interfaces),
    made("NET/IB : Using", r"NET/IB : Using\b(.*)", _hcas),
    form("No device found", r"(?P<why>NET/IB ?: No device found)", f.NoHca),
    form("libibverbs", r"(?P<why>Failed to open libibverbs\.so[.\d]*)", f.NoHca),
    form(
        "NET/IB",
        r"NET/IB ?: \[\d+\] (?P<device>[\w.-]{1,64}):(?:\w{1,64}:)?(?P<port>\d+)/(?P<link>IB|RoCE)\b(?:.{0,60}? speed=(?P<speed_mbps>\d+))?",
        f.Nic,
    ),
    form(
        "Made virtual device",
        r"Made virtual device \[\d+\] name=(?P<device>\S{1,400}) speed=(?P<speed_mbps>\d+) ndevs=\d+",
        f.Nic,
        link="merged",
    ),
    form("Using network", r"Using network (?P<name>[A-Za-z][\w.+-]*(?: [A-Z][\w.+-]*)*)", f.Network),
    form("elected ", r"NET/OFI [Ss]elected [Pp]rovider is (?P<name>[\w;.-]+)", f.Provider),
    form("Loaded ", r"NET/Plugin ?: Loaded (?P<kind>\w{1,16}) plugin (?P<name>\S.{0,80}? \(v\d+\))", f.Plugin),
    form("Assigned ", r"Assigned (?P<kind>[A-Z]{2,8}) plugin (?P<name>\S.{0,80}?) to comm", f.Plugin),
    form("Assigned plugin", r"\b(?P<kind>[A-Z]{2,8})/Plugin: Assigned plugin (?P<name>\S.{0,80}?) type", f.Plugin),
    form("/Plugin: Using ", r"\b(?P<kind>[A-Z]{2,8})/Plugin: Using (?P<name>\S.{0,80}? \(v\d+\))", f.Plugin),
    form("P2P plugin", r"(?P<kind>P2P) plugin (?:v\d+ )?(?P<name>IBext\w*)", f.Plugin),
    form("aws-ofi-nccl", r"NET/(?P<kind>OFI) Initializing (?P<name>aws-ofi-nccl \S{1,40})", f.Plugin),
    made(
        "GPU Direct RDMA",
        r"GPU Direct RDMA (?:\([^)]{0,40}\) )?([Ee]nabled|[Dd]isabled) for HCA \w+ '([^']{0,80})'",
        lambda m: f.GdrHca(m[1].lower() == "enabled", m[2]),
    ),
    made("GPU Direct RDMA", _GDR_GPU, lambda m: f.GdrGpu(m[1] == "Enabled", m[2], m[3], (m[4] or m[5] or "").strip())),
    form(
        "NET/",
        r"(?P<why>NET/(?!IB|Socket)[A-Za-z]\w{0,30} .{0,200}?(?:[Dd]isabl(?:ed|ing) (?:GDR|GPUDirect)|(?:GDR|GPUDirect)(?: RDMA)?(?: support)?"
        r" (?:is )?(?:disabled|not (?:supported|available|enabled))|not support(?:ed|ing)? (?:GDR|GPUDirect|FI_HMEM)).{0,200})",
        f.GdrPlugin,
    ),
    # settings
    made(" to", r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+) set (?:by environment )?to(?![^ ])(.{0,4096})", _env),
    form(
        "Comm config",
        r"Comm config (?P<name>[\w ]{1,40}?) (?:set to |reset to \w{1,60}=)(?P<value>\S{1,400})",
        f.CommConfig,
    ),
    # NVLink, topology
    made(
        "NVLS multicast",
        r"NVLS multicast support is (not )?available on dev (\d+)",
        lambda m: f.Nvls(m[1] is None, integer(m[2])),
    ),
    made("NVLS comm", r"NVLS comm 0x[0-9a-f]+ headRank", lambda m: f.NvlsUsed()),
    made(
        "cliqueSize",
        r"MNNVL ([01]) cliqueId \S+ cliqueSize (\d+) cliqueRank",
        lambda m: f.Mnnvl(m[1] == "1", integer(m[2])),
    ),
    form(
        "=== System",
        rf"=== System : max(?:Bw|Width) (?P<max_bw>{_NUMBER})(?: total(?:Bw|Width) (?P<total_bw>{_NUMBER}))? =",
        f.System,
    ),
    made(" :GPU/", r"(GPU/[0-9a-f-]+) :(?=GPU/)(.*)", lambda m: f.Paths(m[1], tuple(_PATH.findall(m[2])))),
    form(
        "Pattern ",
        rf"(?P<text>Pattern (?P<pattern>\d+), crossNic \d+, nChannels (?P<nchannels>\d+), (?:bw|speed) (?P<bw_intra>{_NUMBER})/(?P<bw_inter>{_NUMBER}), "
        r"(?:nvlink \d+, )?(?:type (?P<type_intra>\w+)(?:/(?P<type_inter>\w+))?, )?sameChannels \d+)",
        f.Pattern,
    ),
    # errors that are no WARN
    made(
        "-> ",
        r"(?<![\w./-])([\w./-]+\.(?:cc|cu|cpp|h|cuh):\d+)(?: \([^()]{0,200}\))? -> (\d+)\b",
        lambda m: f.Trail(m[1], integer(m[2])),
    ),
    made(
        "retrying",
        r"(?:Call to )?connect (?:to \S{1,200} )?returned ((?:(?!connect ).){0,200}?), retrying",
        lambda m: f.Retry(m[1]),
    ),
    made(" failure", r"(?:Cuda|CUDA|HIP) failure:? (?:\d+ )?'([^']{0,400})'", lambda m: f.CudaFailure(m[1])),
    made(
        "RAS",
        r"RAS (declaring peer .{1,200}? as DEAD.{0,200}|[\w-]{1,40} timeout (?:warning|error).{0,200})",
        lambda m: f.RasDead(m[1].strip()),
    ),
    *torch.FORMS,
    *frameworks.FORMS,
    *system.FORMS,
)
