"""The table of findings: check, severity, meaning and advice of each. A new finding is one entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commwatch_collectors.nccl import differences, failures, reasons, slowness
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.beside import rules as beside
from commwatch_collectors.nccl.beside import timeouts
from commwatch_collectors.nccl.evidence import FINISHED, Live, Log, Rule
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.nccl.order import CAUSE, CONSEQUENCE, SYMPTOM, in_time
from commwatch_collectors.nccl.vocabulary.words import KINDS

#: Most lines that are shown for one finding.
MOST_EVIDENCE = 5
SEVERITIES = ("error", "warning", "info")
#: Classes of warnings that have no check of their own beside the words.
_ONLY_BY_WORDS = (
    "nvlink_sharp",
    "shm",
    "peer_to_peer",
    "network_plugin",
    "memory_registration",
    "topology",
    "bootstrap",
    "setting",
    "invalid_usage",
    "internal",
)


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
    *beside.CAUSES,
    # -- errors -----------------------------------------------------------------------------------
    Rule(
        "watchdog_timeout",
        "error",
        "a collective timed out",
        "PyTorch's watchdog gave up: some rank never entered a collective in which others wait, or the network lost data.",
        "Find out what the suspected rank did instead (its stack, its data loader, an exception). Raise the time-out only "
        "if it had a reason to be late.",
        timeouts.watchdogs,
        SYMPTOM,
    ),
    Rule(
        "init_incomplete",
        "error",
        "a communicator's init never finished",
        "The init needs all ranks: it waits until the last one has joined.",
        "Check the missing ranks: not started, crashed, a different world size or NCCL_COMM_ID, or a firewall between "
        "the nodes' interfaces (NCCL_SOCKET_IFNAME).",
        failures.inits_incomplete,
        SYMPTOM,
    ),
    Rule(
        "version_mismatch",
        "error",
        "ranks have different NCCL versions",
        "A communicator cannot mix versions: its init fails, hangs or crashes.",
        "Use one image or environment on all nodes; look for a second libnccl in LD_LIBRARY_PATH.",
        failures.versions_differ,
    ),
    Rule(
        "connection_refused",
        "error",
        "a connection could not be made",
        "The peer's process is not running, or the network blocks the connection.",
        "Check whether the peer died first. If not, check firewalls, routes and NCCL_SOCKET_IFNAME on both sides.",
        reasons.of_kind("connection_refused"),
    ),
    Rule(
        "ib_completion_error",
        "error",
        "a transfer over InfiniBand or RoCE failed",
        "The communicator is unusable from here on; the job has to be restarted.",
        "Status 12: check the peer first (did it crash?), then the link (ibstat, error counters), and on RoCE "
        "NCCL_IB_GID_INDEX and flow control. Only then raise NCCL_IB_TIMEOUT. Status 5 alone: find the request that failed first.",
        failures.ib_errors,
    ),
    Rule(
        "ib_async_event",
        "error",
        "a network card reported a fault",
        "A port went down, or a queue or the card itself failed. Transfers over it will fail next.",
        "Check dmesg and the switch's log of that port at that time. Replace the cable or the card if it happens again.",
        failures.ib_events,
    ),
    Rule(
        "cuda_error",
        "error",
        "CUDA or HIP failed",
        "A kernel or a driver call failed; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg, and check the memory in use. CUDA_LAUNCH_BLOCKING=1 shows which kernel failed.",
        reasons.of_kind("cuda_error"),
    ),
    Rule(
        "duplicate_gpu",
        "error",
        "two ranks use one GPU",
        "NCCL refuses to create such a communicator.",
        "Call torch.cuda.set_device(LOCAL_RANK) before the process group is created, and check CUDA_VISIBLE_DEVICES.",
        reasons.of_kind("duplicate_gpu"),
    ),
    Rule(
        "mismatch",
        "error",
        "ranks call different collectives or sizes",
        "One rank calls a different collective, passes a different size or uses a different order: the job hangs, or data is corrupted.",
        "Look for a branch around the collective that depends on rank or data. Run with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        failures.mismatches,
    ),
    Rule(
        "ras_dead_peer",
        "error",
        "NCCL has lost a peer",
        "Its process or node no longer answers.",
        "Check that node: out of memory, preempted, power, network.",
        failures.ras_deaths,
        SYMPTOM,
    ),
    Rule(
        "peer_lost",
        "error",
        "a call failed because a peer was gone",
        "This follows from the end of that peer: its process crashed, was killed, or gave up on an error of its own. The cause is not in this log.",
        "Look at the peer first: the end of its log, its exception, dmesg of its node (out of memory, Xid), the scheduler's record. "
        "If it was alive, a firewall or a switch has cut the connection.",
        reasons.peers_lost,
        CONSEQUENCE,
    ),
    Rule(
        "silent_failure",
        "error",
        "NCCL failed without a warning",
        "NCCL gave up at this place in its source and printed no reason.",
        "In socket.cc and bootstrap.cc, suspect the network between the processes; in net_ib.cc, the fabric. If the peers' logs have "
        "details, start there.",
        failures.silent_failures,
        CONSEQUENCE,
    ),
    Rule(
        "torch_error",
        "error",
        "PyTorch gave up on an NCCL call",
        "The call returned this error. NCCL prints the reason only at NCCL_DEBUG=WARN.",
        "Run again with NCCL_DEBUG=WARN. Invalid usage is often two ranks on one GPU, or a communicator used after its end.",
        failures.torch_errors,
        CONSEQUENCE,
    ),
    Rule(
        "system_error",
        "error",
        "a system or library call failed",
        "A resource is missing or a library is broken.",
        "Check the job's limits (ulimit -l and -n, size of /dev/shm), and that devices are passed into the container.",
        reasons.of_kind("system_error"),
    ),
    Rule(
        "timeout",
        "error",
        "NCCL or a plug-in timed out",
        "A peer or a service did not answer in time.",
        "Check what the peer did at that time, then the network between the two.",
        reasons.of_kind("timeout"),
    ),
    *(
        Rule(kind, "error", KINDS[kind], "NCCL gives this as the reason.", "Read the line.", reasons.of_kind(kind))
        for kind in _ONLY_BY_WORDS
    ),
    Rule(
        "nccl_failed",
        "error",
        "a call failed after this warning",
        "The line is the reason of the failure. Its words are not among those that commwatch knows.",
        "Search NCCL's issue tracker for the words of the line.",
        reasons.unknown,
    ),
    Rule(
        "earlier_failure",
        "error",
        "a call failed because of an earlier failure",
        "The communicator had failed before this line. The cause is not in this log.",
        "Find the first error of this process, or the rank that failed first.",
        reasons.earlier_failures,
        CONSEQUENCE,
    ),
    *beside.FAILURES,
    # -- warnings ---------------------------------------------------------------------------------
    Rule(
        "socket_transport",
        "warning",
        "ranks communicate over TCP sockets",
        "Sockets reach only a small part of the bandwidth of InfiniBand or RoCE, and cost CPU time.",
        "Pass /dev/infiniband into the container, install the verbs library or the cloud's network plug-in, and check "
        "NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA. With Ethernet only, try NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD.",
        slowness.sockets,
    ),
    Rule(
        "network_inside_node",
        "warning",
        "ranks of one node communicate over the network",
        "They could reach each other over NVLink, PCIe or shared memory.",
        "Remove NCCL_P2P_DISABLE, NCCL_SHM_DISABLE or NCCL_P2P_LEVEL=LOC. Let containers of one node share /dev/shm and the "
        "IPC and PID namespaces.",
        slowness.network_inside_node,
    ),
    Rule(
        "gdr_off",
        "warning",
        "GPUDirect RDMA is not used",
        "Each byte goes through host memory on its way to the network. That costs bandwidth, latency and CPU time.",
        "Load nvidia-peermem, or use DMA-BUF (open driver, Linux 5.12 or later). Where a distance is refused, use a card on the GPU's "
        "PCIe switch, or allow it with NCCL_NET_GDR_LEVEL. If only sends are affected, NCCL_NET_GDR_READ=1 may help.",
        slowness.gdr_off,
    ),
    Rule(
        "shared_memory",
        "warning",
        "GPUs of one node exchange data through host memory",
        "Peer-to-peer access is off or not possible between them (some models lack it): every byte is copied twice over PCIe.",
        "Check NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, nvidia-smi topo -p2p r, and whether IOMMU or ACS is on.",
        slowness.shared_memory,
    ),
    Rule(
        "slow_path",
        "warning",
        "GPUs are far from each other",
        "Data crosses the CPU (PHB) or the link between CPUs (SYS), which NVLink or a shared PCIe switch would avoid.",
        "Run nvidia-smi topo -m and choose GPUs that are close to each other. Look for links that are down (nvidia-smi nvlink -s).",
        slowness.slow_paths,
    ),
    Rule(
        "uneven_ranks",
        "warning",
        "a rank has slower connections than its peers",
        "The slowest rank sets the pace for all ranks.",
        "Compare that node with another: NVLinks down, a card in a different slot, a port at lower speed.",
        differences.uneven_ranks,
    ),
    Rule(
        "networks_differ",
        "warning",
        "ranks chose different networks",
        "Ranks on different networks cannot reach each other: the init fails or hangs.",
        "Use the same plug-ins and NCCL_NET on all nodes.",
        differences.networks_differ,
    ),
    Rule(
        "settings_differ",
        "warning",
        "a setting differs between ranks",
        "Ranks that decide differently can hang, or all ranks run at the pace of the slowest.",
        "Set it for the whole job in one place (the launcher's environment, /etc/nccl.conf on all nodes).",
        differences.settings_differ,
    ),
    Rule(
        "devices_differ",
        "warning",
        "ranks have different network devices",
        "A node with fewer cards slows down all ranks. Interfaces on different networks may not reach each other.",
        "Check the cards of the node that differs (ibstat), and set NCCL_IB_HCA and NCCL_SOCKET_IFNAME explicitly.",
        differences.devices_differ,
    ),
    Rule(
        "sharp_unused",
        "warning",
        "SHARP (CollNet) is not used",
        "It was requested but failed, and NCCL uses ordinary algorithms instead.",
        "Check that the SHARP aggregation manager (sharp_am) runs and has room for the job. Otherwise unset NCCL_COLLNET_ENABLE.",
        slowness.sharp_unused,
    ),
    Rule(
        "nvls_unused",
        "warning",
        "NVLink SHARP is not used",
        "It was requested, but collectives inside the node run without the switch's help.",
        "It needs Hopper or later GPUs behind NVSwitch and a running fabric manager. NCCL_DEBUG_SUBSYS=NVLS prints details.",
        slowness.nvls_unused,
    ),
    Rule(
        "device_closed",
        "warning",
        "network cards cannot be opened",
        "They are listed, but this process is not allowed to use them, so NCCL does without them.",
        "Pass /dev/infiniband into the container, and name the cards to use with NCCL_IB_HCA.",
        failures.devices_closed,
    ),
    Rule(
        "slow_init",
        "warning",
        "an init took a long time",
        "No training happens meanwhile, and each further communicator may take as long.",
        "In bootstrap, it waits for late ranks or a slow network. In topo or graphs, save the result with NCCL_GRAPH_DUMP_FILE. "
        "Otherwise check the driver and the file system.",
        slowness.slow_inits,
    ),
    Rule(
        "other_warning",
        "warning",
        "a warning of an unknown kind",
        "NCCL printed a warning that commwatch does not recognise.",
        "Read the line, and search NCCL's issue tracker for its text.",
        reasons.unknown_alone,
    ),
    Rule(
        "known_warning",
        "warning",
        "NCCL warns",
        "No failed call follows it in this log.",
        "Read the line.",
        reasons.known_alone,
    ),
    # -- good to know -----------------------------------------------------------------------------
    Rule(
        "transport_disabled",
        "info",
        "a setting switches a transport off",
        "This may be intended, or left over from debugging.",
        "Try the job without it.",
        slowness.disabled,
    ),
    Rule(
        "hca_unused",
        "info",
        "a network card is not used by any rank",
        "Its bandwidth is idle. That is as intended if it is for storage or management, or if the job uses few of the node's GPUs.",
        "Check NCCL_IB_HCA and the placement of GPUs and cards (nvidia-smi topo -m).",
        slowness.hcas_unused,
    ),
    Rule(
        "peer_closed",
        "info",
        "a peer closed its connection",
        "This is a consequence: the peer failed or ended first.",
        "Find the rank that failed first; its log has the reason.",
        reasons.peers_closed,
    ),
    Rule(
        "clean_up",
        "info",
        "what a failed or ending process leaves",
        "Communicators were closed while work was under way.",
        "If training was still running, find the rank that failed first.",
        reasons.clean_ups,
    ),
    Rule(
        "connection_retried",
        "info",
        "connections had to be retried",
        "The peer was not listening yet. This is harmless unless it continues.",
        "If the init is slow as well, find out why the peer started late.",
        slowness.retries,
    ),
    Rule(
        "hint",
        "info",
        "NCCL gives advice",
        "NCCL works, but not as well as it could.",
        "Follow the advice in the line. That MSCCL++ cannot be enabled is not a fault.",
        reasons.hints,
    ),
    Rule(
        "teardown_noise",
        "info",
        "service threads lost their peers",
        "This is normal when a job ends, and a sign of a dead rank if training was still running.",
        "Nothing needs to be done if it happened at the end.",
        failures.teardown,
    ),
    Rule(
        "interfaces_differ",
        "info",
        "ranks bootstrap on interfaces with different names",
        "The interfaces are in the same network, so this alone is harmless.",
        "If the init is slow or hangs, set NCCL_SOCKET_IFNAME (one list of prefixes can cover all nodes).",
        differences.interfaces_differ,
    ),
    Rule(
        "port_changed",
        "info",
        "a network card's port has changed",
        "It came up, or its addresses or its subnet manager changed. This is not a failure in itself.",
        "If transfers failed at that time, check the fabric.",
        failures.ib_changes,
    ),
    Rule(
        "ras_slow_peer",
        "info",
        "a peer answers slowly",
        "NCCL's RAS threads waited for it. It may have recovered.",
        "If the job hangs, check that node first.",
        failures.ras_delays,
    ),
    Rule(
        "cut_output",
        "info",
        "part of the debug output is missing",
        "The log starts late, ends early or lacks INIT, so the findings cover only what it contains.",
        "Use complete logs, with INIT in NCCL_DEBUG_SUBSYS. If the job made no progress after the log ends, its init hangs there.",
        slowness.cut_output,
    ),
    Rule(
        "mixed_output",
        "info",
        "the debug output is damaged",
        "Several processes write to one stream and cut each other's lines. Only intact messages have been read.",
        "Give each process its own file, for example with NCCL_DEBUG_FILE=/path/%h.%p.",
        slowness.mixed_output,
    ),
    *beside.EVENTS,
)


def findings(account: Account, rules: Iterable[Rule] = RULES, live: Live = FINISHED) -> list[Finding]:
    """Return the findings of a log, worst first; of errors those first that explain others, else those that came first.

    What only follows from an error is information, if that error is in the log.
    """
    log = Log(account, live)
    hits = [(rule, hit) for rule in rules for hit in rule.check(log)]
    if any(rule.severity == "error" and rule.depth == CAUSE for rule, _ in hits):
        hits = [(rule._replace(severity="info") if rule.depth == CONSEQUENCE else rule, hit) for rule, hit in hits]
    order = in_time([hit.evidence for _, hit in hits])
    hits = [hits[at] for at in sorted(range(len(hits)), key=lambda at: _key(hits[at][0], order[at]))]
    return [
        Finding(
            rule.name,
            rule.severity,
            rule.title,
            hit.says,
            hit.means or rule.means,
            hit.do or rule.do,
            _evidence(hit.evidence),
        )
        for rule, hit in hits
    ]


def _key(rule: Rule, at: float) -> tuple[int, int, float]:
    error = rule.severity == "error"
    return SEVERITIES.index(rule.severity), rule.depth if error else CAUSE, at if error else 0.0


def _evidence(places: Iterable[Seen]) -> list[Evidence]:
    """Return each line once, ``MOST_EVIDENCE`` at most: a line may hold several facts of one finding."""
    once = {(seen.source, seen.number): Evidence(seen.source, seen.number, seen.line.strip()) for seen in places}
    return list(once.values())[:MOST_EVIDENCE]
