"""Facts: the content of messages as values. A field that the message's form lacks is ``None``.

Names are NCCL's own (``nranks``, ``busId`` as ``bus_id``). Ranks are ranks in the communicator, not in the job."""

from __future__ import annotations

from typing import NamedTuple

from commwatch_collectors.nccl.beside.facts import (
    Barrier,
    CommTimeout,
    Desync,
    Died,
    ElasticReport,
    GaveUp,
    Gloo,
    Progress,
    Raised,
    Relayed,
    Speaks,
    Store,
    Stuck,
    TorchError,
    Ucx,
    Uncaught,
    Watchdog,
    Where,
    Xid,
)

#: The facts of other programs' lines, which are used from here as well.
# fmt: off
__all__ = [
    "Barrier", "CommTimeout", "Desync", "Died", "ElasticReport", "GaveUp", "Gloo", "Progress", "Raised",
    "Relayed", "Speaks", "Store", "Stuck", "TorchError", "Ucx", "Uncaught", "Watchdog", "Where", "Xid",
]
# fmt: on


class Version(NamedTuple):
    """The version of the library."""

    library: str
    version: str
    cuda: str | None = None
    hip: str | None = None
    own: bool = True  # followed by the CUDA or HIP it was built for: the library's own line, not a quotation


class Build(NamedTuple):
    """Another version of the build: ``HIP``, ``ROCm``, ``librccl`` (its path) or ``git``."""

    what: str
    version: str


class Rccl(NamedTuple):
    """Text that only RCCL prints."""


class Driver(NamedTuple):
    """``cudaDriverVersion``."""

    version: int


class Plugin(NamedTuple):
    """A plugin that is used: ``kind`` is ``NET``, ``net``, ``P2P``, ``OFI``, ``TUNER``, .. as printed."""

    kind: str
    name: str


class Interfaces(NamedTuple):
    """Interfaces of the bootstrap (``Bootstrap``) or of the socket transport (``NET/Socket``)."""

    use: str
    names: tuple[str, ...]


class BootstrapTime(NamedTuple):
    """Duration of the rendezvous, in s."""

    total_s: float


class Hca(NamedTuple):
    """One device of ``NET/IB : Using``; ``number`` is the N of ``via NET/IB/N``, shared by the ports of a merged one."""

    number: int
    device: str
    port: int
    link: str


class Hcas(NamedTuple):
    """The devices of ``NET/IB : Using``."""

    devices: tuple[Hca, ...]


class NoHca(NamedTuple):
    """``NET/IB : No device found``, or no verbs library: ``why`` is the text."""

    why: str


class Nic(NamedTuple):
    """A port of an HCA as the verbs see it, or several used as one (no ``port``, ``link`` is ``merged``)."""

    device: str
    port: int | None
    link: str
    speed_mbps: int | None


class Network(NamedTuple):
    """``Using network``."""

    name: str


class Provider(NamedTuple):
    """libfabric's provider."""

    name: str


class GdrHca(NamedTuple):
    """Whether GPUDirect RDMA works with an HCA."""

    enabled: bool
    hca: str


class GdrGpu(NamedTuple):
    """Whether GPUDirect RDMA is used between a GPU and an HCA, by their distance."""

    enabled: bool
    gpu: str
    hca: str
    why: str  # as printed; empty where the form has none


class GdrPlugin(NamedTuple):
    """A network plug-in does without GPUDirect RDMA; ``why`` is its text."""

    why: str


class Env(NamedTuple):
    """A setting that NCCL has read."""

    name: str
    value: str


class CommConfig(NamedTuple):
    """A setting of one communicator, made by the program."""

    name: str
    value: str


class Init(NamedTuple):
    """A communicator's init begins (``start``) or is complete."""

    start: bool
    comm: str | None = None
    rank: int | None = None
    nranks: int | None = None
    cuda_dev: int | None = None
    nvml_dev: int | None = None
    bus_id: str | None = None
    parent: str | None = None
    child: int | None = None  # how many communicators its parent has had
    color: int | None = None
    key: int | None = None
    comm_id: str | None = None


class End(NamedTuple):
    """A communicator's end: ``Destroy``, ``Abort`` or ``Revoke``."""

    how: str
    comm: str | None = None
    rank: int | None = None
    nranks: int | None = None


class InitTime(NamedTuple):
    """Duration of an init, in s."""

    rank: int
    nranks: int
    total_s: float


class Layout(NamedTuple):
    """How many nodes a communicator has."""

    nranks: int
    nnodes: int
    local_ranks: int


class Mnnvl(NamedTuple):
    """NVLink across nodes: whether it is used, and how many ranks it joins."""

    used: bool
    clique_size: int


class Ring(NamedTuple):
    """Order of the ranks in a channel, as printed: long ones are cut."""

    channel: int
    of: int
    order: tuple[int, ...]


class Neighbours(NamedTuple):
    """A rank's place in the ring of a channel."""

    channel: int
    previous: int
    rank: int
    following: int


class Tree(NamedTuple):
    """A rank's place in the tree of a channel; -1: no rank."""

    channel: int
    up: int
    rank: int
    down: tuple[int, ...]


class Trees(NamedTuple):
    """A rank's places in the trees of all channels, as printed."""

    text: str
    comm: str | None = None


class Channels(NamedTuple):
    """Channel counts of a communicator."""

    coll: int
    collnet: int | None
    nvls: int | None
    p2p: int
    p2p_per_peer: int


class Connected(NamedTuple):
    """All ``rings``, all ``trees``, the ``NVLS tree``, or another algorithm's channels are connected."""

    what: str


class Via(NamedTuple):
    """A connection between two ranks. ``kind`` is ``P2P/IPC``, ``SHM``, ``NET/IB``, ..."""

    src: int
    dst: int
    direction: str  # as printed (NET: by both ends), else empty (the sender prints)
    kind: str
    device: str | None = None
    gdr: bool = False
    comm: str | None = None  # RCCL appends it


class CollNetVia(NamedTuple):
    """A rank's connection to the CollNet."""

    rank: int
    direction: str
    net: str
    gdr: bool


class Nvls(NamedTuple):
    """Whether the device can do NVLink SHARP."""

    available: bool
    device: int


class NvlsUsed(NamedTuple):
    """A communicator has NVLS buffers."""


class System(NamedTuple):
    """Head of the topology dump, in GB/s."""

    max_bw: float
    total_bw: float | None


class Pattern(NamedTuple):
    """A graph that was found: bandwidths in GB/s, path types ``NVL`` .. ``SYS``."""

    text: str
    pattern: int
    nchannels: int
    bw_intra: float
    bw_inter: float
    type_intra: str | None
    type_inter: str | None


class Paths(NamedTuple):
    """Paths from a GPU to those of its node: (GPU, type of the path)."""

    gpu: str
    to: tuple[tuple[str, str], ...]


class Algo(NamedTuple):
    """The tuner's choice for a size."""

    collective: str | None
    bytes: int
    algo: str
    proto: str
    channel_lo: int | None
    channel_hi: int | None


class Kernel(NamedTuple):
    """The tuner's choice of a symmetric kernel or a copy engine."""

    collective: str
    kind: str
    bytes: int
    choice: str


class Coll(NamedTuple):
    """A collective was called; ``datatype`` and ``op`` are NCCL's numbers, ``elements`` is its count."""

    name: str
    elements: int
    datatype: int
    op: int
    root: int
    nranks: int | None


class Call(NamedTuple):
    """A public function was called (``NCCL CALL``)."""

    function: str


class Trail(NamedTuple):
    """``file:line -> n``: an error on its way up; ``code`` is an ncclResult_t."""

    place: str
    code: int


class Retry(NamedTuple):
    """A connection that is tried again."""

    error: str


class CudaFailure(NamedTuple):
    """A CUDA or HIP error at INFO level."""

    text: str


class RasDead(NamedTuple):
    """RAS has lost a peer."""

    text: str


# fmt: off
Fact = (
    Version | Build | Rccl | Driver | Plugin | Env | CommConfig
    | Interfaces | BootstrapTime | Hcas | NoHca | Nic | Network | Provider | GdrHca | GdrGpu | GdrPlugin
    | Init | End | InitTime | Layout | Mnnvl
    | Ring | Neighbours | Tree | Trees | Channels | Connected | Via | CollNetVia | Nvls | NvlsUsed
    | System | Pattern | Paths | Algo | Kernel | Coll | Call
    | Trail | Retry | CudaFailure | RasDead
    | Watchdog | Progress | Relayed | GaveUp | Stuck | CommTimeout | TorchError | Speaks | Raised | Uncaught | Desync
    | Barrier | Gloo | Store | Died | ElasticReport | Xid | Ucx
)
# fmt: on
