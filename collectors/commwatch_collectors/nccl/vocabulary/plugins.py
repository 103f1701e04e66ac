"""Warnings of plug-ins: for libfabric and EFA (aws-ofi-nccl), of NVIDIA (SHARP, UCX), of Google, and how NCCL loads them."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_GROUP = (
    "The security group must allow all traffic from and to itself, in both directions (inbound and outbound rules that name the group), "
    "and all instances must be in one availability zone."
)
_DEVICES = (
    "Run fi_info -p efa (HPE Slingshot: -p cxi) on the node and in the container. Pass in /dev/infiniband (in Kubernetes, the resource "
    "vpc.amazonaws.com/efa), and install the EFA software with libfabric in the image."
)
_VERSIONS = "Use the same version of the EFA installer, libfabric and aws-ofi-nccl in the image, and the driver of that installer on the host."
_GDR = (
    "GPUDirect RDMA needs an instance type that has it (such as p4d and p5), a current EFA driver, libfabric 1.18 or later, and a plug-in "
    "that was built with CUDA."
)
_MEMLOCK = "Raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1)."

PLUGINS: tuple[Words, ...] = (
    Words(
        "other",
        r"",
        "Google's profiler plug-in (CoMMA) records less. Communication is not affected.",
        "Nothing needs to be done for the job. NCCL_PROFILER_PLUGIN=none does without CoMMA.",
        "info",
        r"\.rs\b",
        is_harmless=True,
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,400}(?i:completed with error.{0,200}(?:unreachable|err: 113|RC: (?:20|113)\b|unresponsive|never established))",
        "The card of the peer cannot be reached over EFA: the network drops its packets, or its process has ended.",
        f"{_GROUP} If other jobs work on these nodes, find the process that failed first.",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,400}(?i:completed with error.{0,80}invalid address(?! handle))",
        "The card does not know the address of the peer any more: its process has ended or was started again, or the software is old.",
        f"Look at the process of the peer: did it fail or start again first? {_VERSIONS}",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,400}(?i:completed with error.{0,300}(?:dest(?:ination)? ?QP|bad dest|unknown (?:peer|remote)|invalid address handle"
        r"|remote (?:job )?abort|remote .{0,20}closed|invalid AH))",
        "The peer's queue no longer exists: its process failed or ended first.",
        "Find the process that failed first; its log has the reason.",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,400}(?i:completed with error.{0,300}(?:flushed|local QP in error|cancel))",
        "This request was cancelled because an earlier one failed, or because the communicator is being closed.",
        "Find the first request that failed, in this log or the peer's.",
    ),
    Words(
        "timeout",
        r"NET/OFI .{0,400}(?i:timed out)",
        "The peer did not answer in time over libfabric.",
        f"Check what the peer did at that time. {_GROUP}",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,400}completed with error|NET/OFI .{0,80}(?:cq_readerr|completion queue entries|error entry|rx buffer recv"
        r"|[Cc]lose message complete)",
        "A transfer over libfabric failed; the communicator is unusable from here on.",
        "Find the process that failed first. If none did, check dmesg for the card (efa), its counters (rdma statistic), and the security group.",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,80}(?:insert (?:remote|local) address|Failed to insert (?:address|new endpoint)|address for peer)",
        "The plug-in could not use the peer's address: the nodes have different plug-ins or cards, or cannot reach each other.",
        f"{_VERSIONS} {_GROUP}",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,120}(?:disabling GDR|GDR disabled|GDR support reported|FI_OPT_CUDA_API_PERMITTED|GDR flush|(?:dma|DMA)-?(?:buf"
        r"|BUF) support)|without GPUDirect RDMA support",
        "The plug-in cannot use GPUDirect RDMA: each byte goes through host memory. That costs bandwidth and CPU time.",
        _GDR,
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,80}(?:requires at least libfabric|immediate data, required|does not provide enough tag bits|MR key size"
        r"|Could not set \S{1,40}\. RC|FI_OPT_\w{1,40}|EMULATED_WRITE|fi_open_ops|FI_PROGRESS_AUTO|not compiled with|not declared"
        r"|address vector using FI_AV_TABLE|FI_MR_ENDPOINT|does not support EFA|non-GDA-capable|not supported on this platform"
        r"|backendVersion|GIN requires|GIN only supports|Model is not supported)",
        "The installed libfabric, or the provider that it chose, lacks a feature that the plug-in needs.",
        f"{_VERSIONS} Unset FI_PROVIDER, or set it to efa.",
    ),
    Words(
        "setting",
        r"NET/OFI .{0,120}(?:OFI_NCCL_\w{1,40}|NCCL_OFI_\w{1,40}|WARNING: (?:Use of )?\S{1,60}|Param \S{1,60} used|EAGER_MAX_SIZE"
        r"|EARLY_COMPLETION|unknown transport|Invalid value for|forced rails|mr keypool size|Unrecognized histogram"
        r"|Attempt to set \S{1,60} after|invalid print format)",
        "A variable of the plug-in has a value that it does not accept, or no longer exists.",
        "Correct or unset the variable that the line names (OFI_NCCL_…).",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,80}(?:fi_getinfo|Unable to find a protocol|Insufficient Libfabric|aws-ofi-nccl initialization failed"
        r"|provider capabilities|Initializing plugin|exception in (?:plugin init|rdma_init|sendrecv_init)|(?:Could not"
        r"|Couldn't) find any optimal provider|Only EFA provider|OFI call failed|find plugin protocol|Device creation failed"
        r"|initialize (?:sendrecv|rdma|\S{1,20}) protocol|has not been initialized|rails?\. Expected at least|unexpected number of devices"
        r"|Unexpected topo group)",
        "The plug-in found no device of libfabric that it can use, so NCCL takes another network or fails.",
        _DEVICES,
    ),
    Words(
        "memory_registration",
        r"NET/OFI .{0,120}(?i:(?<!de)(?<!de-)register (?:memory|dummy)|registration (?:failed|may|key|request)|call to reg_mr"
        r"|pre-registered|MR to EP|enable MR|fi_mr_|map MR buffer|(?<!de)allocate flush buffer|to gpu flush buffer|flush buffer fd"
        r"|MR key (?:allocation|config)|get rx_key)",
        "The card could not register memory.",
        f"{_MEMLOCK} {_GDR}",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,80}(?i:(?:create|open|allocate|bind|enable|enabling|creating|initializing) .{0,60}(?:fabric|domain|endpoint|EP-|AV"
        r"|address vector|CQ|completion queue|rail)|fi_getname|access domain|preparing for connection|Couldn't open)",
        "The card refused a queue, an endpoint or another resource of libfabric.",
        f"{_MEMLOCK} Check that all EFA devices are in the container and that no other job uses them. {_VERSIONS}",
        "error",
    ),
    Words(
        "network_plugin",
        r"NET/OFI .{0,120}(?:\bfi_(?!info|nic|dupinfo|addr|getname|mr_)\w{3,20}|Error (?:posting|in call)|Unable to post|post(?:ing)? (?:rx"
        r"|receive)|Could not send|send connect message|issue (?:read|eager)|Write failed|Metadata send|Failed to post|Call to post_with"
        r"|CM connect failed|bootstrap (?:ring|allgather)|exchange connect metadata|Error in bootstrap|exception in (?:plugin"
        r"|GIN) \w{1,10}:|Cannot open more connection)",
        "A transfer or a connection over libfabric could not be started.",
        f"Find the process that failed first. If none did: {_GROUP}",
        "error",
    ),
    Words(
        "consequence",
        r"NET/OFI .{0,80}(?:with inflight requests|inactive (?:communicator|endpoint|domain)|with outstanding requests"
        r"|non-existent (?:send |r_)?comm|Aborting due to|in-use entries|still held by the application)",
        "This is a consequence: communicators were closed while transfers were under way, because the job ended or a rank failed.",
        "If training was still running, find the rank that failed first.",
        "info",
    ),
    Words(
        "setting",
        r"NET/OFI .{0,80}(?:NCCL_TUNER_PLUGIN|NCCL_PROTO (?:was set|env)|tuner plugin can not|Unable to configure|(?:Failed|Unable"
        r"|Error) (?:to )?set(?:ting)? NCCL_|topology XML file|platform_type|platform priority|NVLS option|shared library info"
        r"|configure tuner|anonymous topology)",
        "The plug-in could not set up NCCL for this type of instance; it works, but perhaps not at full speed.",
        "Check whether the job sets NCCL_TUNER_PLUGIN, NCCL_TOPO_FILE, NCCL_PROTO or NCCL_NVLS_ENABLE itself, and use a plug-in that knows the "
        "instance type.",
    ),
    Words(
        "network_plugin",
        r"Error: network .{0,64} not found|Failed to initialize any NET plugin",
        "The network that NCCL_NET or NCCL_NET_PLUGIN names is not there.",
        "Unset NCCL_NET and NCCL_NET_PLUGIN, or install the plug-in that they name (its libnccl-net.so must be in LD_LIBRARY_PATH on all nodes).",
        "error",
    ),
    Words(
        "network_plugin",
        r"plugin returned invalid|GIN plugin \S{1,64} returned|Error on GFD|GIN Error (?:detected|on gin)|uninitialized (?:net|gin"
        r"|rma)Plugin|number of devices for netPlugin|CollNet sizes",
        "A plug-in returned something that NCCL cannot use.",
        "Update the plug-in to a version for this NCCL. NCCL_NET_PLUGIN=none (NCCL_GIN_ENABLE=0 for GIN) does without it: the network may be slower.",
        "error",
    ),
    Words(
        "setting",
        r"NET/OFI (?:CUDA flush (?:enabled|requested)|NIC_DUP_CONNS)",
        "A setting asks the plug-in for flushes by CUDA or for copies of connections, which is slower or not possible here.",
        "Unset OFI_NCCL_CUDA_FLUSH_ENABLE and OFI_NCCL_NIC_DUP_CONNS.",
        "info",
    ),
    Words(
        "network_plugin",
        r"NET/(?:FasTrak|GPUDirectTCPX)|\bTCPX|fastrak",
        "Google's network plug-in failed.",
        "Check that its receive daemon (rxdm) runs beside the job, in the version of the plug-in and with hostNetwork, and that the job's "
        "variables are those of its nccl-env-profile.sh.",
    ),
    Words(
        "network_plugin",
        r"Cannot get incoming CPU|Maximum retry reached for (?:accept|connect)",
        "Google's plug-in Fast Socket did not find the best queue for a connection, and uses another one.",
        "Nothing needs to be done.",
        "info",
        r"fastsocket",
        is_harmless=True,
    ),
    Words(
        "network_plugin",
        r"\bSHARP:? (?:allgather|Allgather|allreduce|reduce_scat|regmr|deregmr|group create|int8|unsupported)|sharp_coll_\w{1,40} failed",
        "SHARP could not run a collective or register memory in the switches.",
        "Check the log of the aggregation manager (sharp_am). NCCL_COLLNET_ENABLE=0 does without SHARP: large all-reduces between nodes become slower.",
        "error",
    ),
    Words(
        "network_plugin",
        r"UCX error|UCX_TLS|NET[/ ]UCX|\bucx_\w{1,20}|UCX (?:endpoint|am)|UCT (?:iface|listener)",
        "NVIDIA's plug-in uses UCX, and UCX failed.",
        "Find the process that failed first. Compare UCX_TLS and UCX_NET_DEVICES with the cards (ucx_info -d). NCCL_PLUGIN_P2P=ib, or "
        "NCCL_NET_PLUGIN=none, does without UCX.",
        "error",
    ),
    Words(
        "setting",
        r"NCCL_PLUGIN_P2P|PCI relaxed order memory access requested",
        "A setting for NVIDIA's plug-in has a value that it does not accept; it uses another one.",
        "Correct or unset NCCL_PLUGIN_P2P and NCCL_IB_PCI_RELAXED_ORDERING.",
    ),
    Words(
        "network_plugin",
        r"Profiler init failed",
        "A plug-in for profiling is not used. NCCL works without it.",
        "Correct or unset NCCL_PROFILER_PLUGIN.",
        "info",
    ),
)
