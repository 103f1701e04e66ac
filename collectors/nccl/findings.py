"""The table of findings: check, severity, meaning and advice of each. A new finding is one entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commwatch.collectors.nccl import differences, failures, slowness, timeouts
from commwatch.collectors.nccl.account import Account, Seen
from commwatch.collectors.nccl.evidence import Check, Log

#: Most lines that are shown for one finding.
MOST_EVIDENCE = 5
SEVERITIES = ("error", "warning", "info")


class Rule(NamedTuple):
    """One kind of finding."""

    name: str
    severity: str
    title: str
    #: What it means for the job, and what to do about it.
    means: str
    do: str
    check: Check


@dataclass(frozen=True)
class Evidence:
    """A log line that shows a finding."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A problem in this log, or another fact worth knowing."""

    name: str
    severity: str
    title: str
    #: Details of this case.
    says: str
    means: str
    do: str
    evidence: list[Evidence]


RULES: tuple[Rule, ...] = (
    # -- errors -----------------------------------------------------------------------------------
    Rule(
        "watchdog_timeout",
        "error",
        "a collective timed out",
        "PyTorch's watchdog gave up: some rank never came to a collective that others wait in, or the network lost it.",
        "Find what the suspected rank did instead (its stack, its data loader, an exception); raise the time-out only if "
        "it had a reason to be late.",
        timeouts.watchdogs,
    ),
    Rule(
        "init_incomplete",
        "error",
        "a communicator's init never ended",
        "All ranks have to meet in it: it waits until the last has come.",
        "Look at the missing ranks: not started, crashed, another world size or NCCL_COMM_ID, or a firewall between "
        "the nodes' interfaces (NCCL_SOCKET_IFNAME).",
        failures.inits_incomplete,
    ),
    Rule(
        "version_mismatch",
        "error",
        "ranks have different NCCL versions",
        "One communicator cannot have several versions: its init fails, hangs or crashes.",
        "Use one image or environment on all nodes; look for a second libnccl in LD_LIBRARY_PATH.",
        failures.versions_differ,
    ),
    Rule(
        "connection_refused",
        "error",
        "a connection could not be made",
        "The peer's process is not there, or the network does not let the two meet.",
        "See whether the peer died first; else check firewalls, routes and NCCL_SOCKET_IFNAME on both sides.",
        failures.of_class("connection_refused"),
    ),
    Rule(
        "ib_completion_error",
        "error",
        "a transfer over InfiniBand or RoCE failed",
        "The communicator is broken from here on; the job has to be started again.",
        "Status 12: look at the peer first (did it crash?), then at the link (ibstat, error counters), on RoCE at "
        "NCCL_IB_GID_INDEX and flow control; only then raise NCCL_IB_TIMEOUT. Status 5 alone: find the request that failed first.",
        failures.ib_errors,
    ),
    Rule(
        "ib_async_event",
        "error",
        "a network card reported a fault",
        "A port went down, or a queue or the card itself has failed: transfers over it fail next.",
        "See dmesg and the switch's log of that port at that time; replace the cable or card if it comes again.",
        failures.ib_events,
    ),
    Rule(
        "cuda_error",
        "error",
        "CUDA or HIP failed",
        "A kernel or a driver call failed; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg and at the memory in use; CUDA_LAUNCH_BLOCKING=1 shows which kernel failed.",
        failures.of_class("cuda_error"),
    ),
    Rule(
        "duplicate_gpu",
        "error",
        "two ranks use one GPU",
        "NCCL refuses to make such a communicator.",
        "Call torch.cuda.set_device(LOCAL_RANK) before the process group is made; check CUDA_VISIBLE_DEVICES.",
        failures.of_class("duplicate_gpu"),
    ),
    Rule(
        "mismatch",
        "error",
        "ranks do not call the same",
        "One rank calls another collective, another size or in another order: it hangs or corrupts data.",
        "Look for a branch that depends on rank or data around the collective; run with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        failures.mismatches,
    ),
    Rule(
        "ras_dead_peer",
        "error",
        "NCCL has lost a peer",
        "Its process or node does not answer any more.",
        "Look at that node: out of memory, preempted, power, network.",
        failures.ras_deaths,
    ),
    Rule(
        "silent_failure",
        "error",
        "NCCL failed without a warning",
        "It gave up at this place in its source and said no more.",
        "In socket.cc and bootstrap.cc it is the network between the processes, in net_ib.cc the fabric; if the peers' logs say more, "
        "begin there.",
        failures.silent_failures,
    ),
    Rule(
        "torch_error",
        "error",
        "PyTorch gave up on an NCCL call",
        "The call returned this; why, NCCL says only at NCCL_DEBUG=WARN.",
        "Run again with NCCL_DEBUG=WARN. Invalid usage is often two ranks on one GPU, or a communicator used after its end.",
        failures.torch_errors,
    ),
    Rule(
        "system_error",
        "error",
        "a call to the system failed",
        "A resource is missing or a library is broken.",
        "Check the limits in the job (ulimit -l and -n, size of /dev/shm), and that devices are passed into the container.",
        failures.of_class("system_error"),
    ),
    Rule(
        "timeout",
        "error",
        "NCCL or a plug-in has waited in vain",
        "A peer or a service did not answer in time.",
        "See what the peer did at that time; then the network between the two.",
        failures.of_class("timeout"),
    ),
    # -- warnings ---------------------------------------------------------------------------------
    Rule(
        "socket_transport",
        "warning",
        "ranks talk over TCP sockets",
        "They reach a small part of the bandwidth of InfiniBand or RoCE, and cost CPU time.",
        "Pass /dev/infiniband into the container, install the verbs library or the cloud's network plug-in, and check "
        "NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA. With Ethernet only, try NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD.",
        slowness.sockets,
    ),
    Rule(
        "network_inside_node",
        "warning",
        "ranks of one node talk over the network",
        "They could reach each other over NVLink, PCIe or shared memory.",
        "Remove NCCL_P2P_DISABLE, NCCL_SHM_DISABLE or NCCL_P2P_LEVEL=LOC; let containers of one node share /dev/shm and the "
        "IPC and PID namespaces.",
        slowness.network_inside_node,
    ),
    Rule(
        "gdr_off",
        "warning",
        "no GPUDirect RDMA",
        "Each byte goes through host memory on its way to the network: less bandwidth, more latency and CPU.",
        "Load nvidia-peermem, or use DMA-BUF (open driver, Linux 5.12 or later). Where a distance is refused, use a card on the GPU's "
        "PCIe switch, or allow it with NCCL_NET_GDR_LEVEL. Only sends: NCCL_NET_GDR_READ=1 may help.",
        slowness.gdr_off,
    ),
    Rule(
        "shared_memory",
        "warning",
        "GPUs of one node meet in host memory",
        "Peer-to-peer is off or not possible between them (some models have none): every byte is copied twice over PCIe.",
        "Check NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, nvidia-smi topo -p2p r, and whether IOMMU or ACS is on.",
        slowness.shared_memory,
    ),
    Rule(
        "slow_path",
        "warning",
        "GPUs are far from each other",
        "Data crosses the CPU (PHB) or the link between CPUs (SYS), which NVLink or one PCIe switch would spare it.",
        "See nvidia-smi topo -m; choose GPUs that are near each other, and look for links that are down (nvidia-smi nvlink -s).",
        slowness.slow_paths,
    ),
    Rule(
        "uneven_ranks",
        "warning",
        "a rank is worse connected than its peers",
        "The slowest rank sets the pace of all.",
        "Compare that node with another: NVLinks down, a card in another slot, a port at lower speed.",
        differences.uneven_ranks,
    ),
    Rule(
        "networks_differ",
        "warning",
        "ranks chose different networks",
        "Those of one cannot talk to those of the other: the init fails or hangs.",
        "Use the same plug-ins and NCCL_NET on all nodes.",
        differences.networks_differ,
    ),
    Rule(
        "settings_differ",
        "warning",
        "a setting differs between ranks",
        "Ranks that decide differently can hang, or all run at the pace of the worst.",
        "Set it for the whole job in one place (the launcher's environment, /etc/nccl.conf on all nodes).",
        differences.settings_differ,
    ),
    Rule(
        "devices_differ",
        "warning",
        "ranks have different network devices",
        "A node with fewer cards slows all down; interfaces of different networks may not reach each other.",
        "Check the cards of the odd node (ibstat) and set NCCL_IB_HCA and NCCL_SOCKET_IFNAME explicitly.",
        differences.devices_differ,
    ),
    Rule(
        "sharp_unused",
        "warning",
        "SHARP (CollNet) is not used",
        "It was asked for, failed, and ordinary algorithms are used instead.",
        "Check that the SHARP aggregation manager (sharp_am) runs and has room for the job; else unset NCCL_COLLNET_ENABLE.",
        slowness.sharp_unused,
    ),
    Rule(
        "nvls_unused",
        "warning",
        "NVLink SHARP is not used",
        "It was asked for; collectives inside the node run without the switch's help.",
        "It needs Hopper or later behind NVSwitch and a running fabric manager; NCCL_DEBUG_SUBSYS=NVLS says more.",
        slowness.nvls_unused,
    ),
    Rule(
        "device_closed",
        "warning",
        "network cards cannot be opened",
        "They are listed but this process may not use them, so NCCL goes without.",
        "Pass /dev/infiniband into the container, and name the cards to use with NCCL_IB_HCA.",
        failures.devices_closed,
    ),
    Rule(
        "slow_init",
        "warning",
        "an init took long",
        "Nothing is trained meanwhile; each further communicator may take as long.",
        "In bootstrap it waits for late ranks or a slow network; in topo or graphs, save the result with NCCL_GRAPH_DUMP_FILE; "
        "elsewhere look at the driver and the file system.",
        slowness.slow_inits,
    ),
    Rule(
        "other_warning",
        "warning",
        "a warning of no known kind",
        "NCCL thought it worth saying.",
        "Read the line; NCCL's issue tracker often knows the text.",
        failures.of_class("other"),
    ),
    # -- good to know -----------------------------------------------------------------------------
    Rule(
        "transport_disabled",
        "info",
        "a setting switches a transport off",
        "Somebody wanted it so; it may be left from the search for an error.",
        "Try without it.",
        slowness.disabled,
    ),
    Rule(
        "hca_unused",
        "info",
        "no rank uses a network card",
        "Its bandwidth lies idle: as it should if it is for storage or management, or if few of the node's GPUs are used.",
        "Check NCCL_IB_HCA and the placement of GPUs and cards (nvidia-smi topo -m).",
        slowness.hcas_unused,
    ),
    Rule(
        "peer_closed",
        "info",
        "a peer closed its connection",
        "A consequence: the peer failed or ended first.",
        "Find the rank that failed first; its log has the reason.",
        failures.peers_closed,
    ),
    Rule(
        "connection_retried",
        "info",
        "connections had to be tried again",
        "The peer was not listening yet; harmless unless it goes on.",
        "If the init is slow as well, see why the peer started late.",
        slowness.retries,
    ),
    Rule(
        "hint",
        "info",
        "NCCL gives advice",
        "It runs, but not as it could.",
        "Do as the line says; that MSCCL++ cannot be enabled is no fault.",
        failures.hints,
    ),
    Rule(
        "teardown_noise",
        "info",
        "service threads lost their peers",
        "Normal when a job ends; a sign of a dead rank if training was still running.",
        "Nothing, if it came at the end.",
        failures.teardown,
    ),
    Rule(
        "interfaces_differ",
        "info",
        "ranks begin on interfaces of different names",
        "They are in the same network, so this alone does no harm.",
        "If the init is slow or hangs, set NCCL_SOCKET_IFNAME (a list of prefixes will do for all nodes).",
        differences.interfaces_differ,
    ),
    Rule(
        "port_changed",
        "info",
        "a network card's port has changed",
        "It came up, or its addresses or its subnet manager changed: no failure in itself.",
        "If transfers failed at that time, look at the fabric.",
        failures.ib_changes,
    ),
    Rule(
        "ras_slow_peer",
        "info",
        "a peer answers slowly",
        "NCCL's RAS threads waited for it; it may have come back.",
        "If the job stands still, look at that node first.",
        failures.ras_delays,
    ),
    Rule(
        "cut_output",
        "info",
        "a part of the debug output is missing",
        "The log begins late, ends early, or leaves INIT out: what is said here rests on what is left.",
        "Use whole logs, with INIT in NCCL_DEBUG_SUBSYS. If the job stood still where the log ends, its init hangs there.",
        slowness.cut_output,
    ),
    Rule(
        "mixed_output",
        "info",
        "the debug output is damaged",
        "Several processes write into one stream and cut each other's lines; what was whole has been read.",
        "Give each process a file, as with NCCL_DEBUG_FILE=/path/%h.%p.",
        slowness.mixed_output,
    ),
)


def findings(account: Account, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """Return the findings of a log, worst first."""
    log = Log(account)
    found = [
        Finding(rule.name, rule.severity, rule.title, hit.says, rule.means, rule.do, _evidence(hit.evidence))
        for rule in rules
        for hit in rule.check(log)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _evidence(places: Iterable[Seen]) -> list[Evidence]:
    """Return each line once, ``MOST_EVIDENCE`` at most: a line may hold several facts of one finding."""
    once = {(seen.source, seen.number): Evidence(seen.source, seen.number, seen.line.strip()) for seen in places}
    return list(once.values())[:MOST_EVIDENCE]
