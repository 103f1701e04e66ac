"""Warnings about InfiniBand, RoCE, sockets, and connections between ranks."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_INTERFACE = (
    "Compare NCCL_SOCKET_IFNAME (or NCCL_OOB_NET_IFNAME) with the interfaces of the node: ip -br addr. A container has only its own "
    "interfaces. Unset it, or use a prefix that fits all nodes."
)
_MEMLOCK = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity for the service of the container runtime or of Slurm"
_LINK_TYPE = "Use cards of one kind, InfiniBand or RoCE, on all nodes: set NCCL_IB_HCA to their names (=mlx5_0,mlx5_1), and leave out the others."
_OOO = "Unset NCCL_IB_OOO_RQ, or enable adaptive routing and the same firmware on all cards."

_CARDS: tuple[Words, ...] = (
    Words(
        "ib_completion_error",
        r"Detected \d{1,9} failed devices|The error is fatal|Maximum number of probing|replacement QP|replace QP|functional device",
        "A card has failed, and NCCL could not move its traffic to another one.",
        "Look for the first error of a transfer or a card before this line. Check that card and its link (ibstat, dmesg) on both sides.",
        "error",
    ),
    Words(
        "ib_completion_error",
        r"Device \d{1,9} marked as failed",
        "A card has failed, and NCCL moves its traffic to another one. The job goes on more slowly.",
        "Check that card and its link (ibstat, dmesg) on both sides.",
    ),
    Words(
        "system_error",
        r"ibv_modify_qp failed.{0,40}(?:110|timed out)",
        "The two cards could not be connected in time: the peer's card does not answer on this network.",
        "Check that the peer's address can be reached from this card (on RoCE: ping -I INTERFACE ADDRESS, the VLAN and its gateway; on "
        "InfiniBand: ibping, the subnet manager). If NCCL_IB_GID_INDEX is set, check it (show_gids). Choose cards of one network with "
        "NCCL_IB_HCA. Where only cards of the same number reach each other (rails), set NCCL_CROSS_NIC=0.",
        "error",
    ),
    Words(
        "system_error",
        r"ibv_modify_qp failed|ibv_query_gid\w{0,20} failed",
        "The two cards could not be connected: the address (GID) does not exist on this port, or there is no path to the peer.",
        "Remove NCCL_IB_GID_INDEX if it is set: the right index differs between nodes, and can change at a reboot (show_gids lists them). "
        "In a container on RoCE, pass in the network interface of the card as well (--net=host). Choose the cards of one network with "
        "NCCL_IB_HCA.",
        "error",
    ),
    Words(
        "system_error",
        r"(?:ibv_(?:create_cq|create_qp|reg_mr\w{0,20}|alloc_pd)|mlx5dv_create_qp)\b.{0,20}failed",
        "The card could not lock or register the memory that it needs.",
        f"Raise the limit of locked memory ({_MEMLOCK}). For memory of GPUs, load nvidia-peermem or use DMA-BUF.",
        "error",
    ),
    Words(
        "system_error",
        r"(?:ibv|mlx5dv)_reg_dmabuf_mr failed",
        "The card could not register memory of the GPU by DMA-BUF.",
        "It needs the open driver of the GPU, Linux 5.12 or later, and a driver of the card that supports it. NCCL_DMABUF_ENABLE=0 uses "
        f"nvidia-peermem instead. Check the limit of locked memory as well ({_MEMLOCK}).",
        "error",
    ),
    Words(
        "system_error",
        r"Unable to (?:open|query) (?:device|port)|ibv_open_device failed|ibv_query_(?:device|port)\b.{0,20}failed",
        "A card is listed, but this process may not use it.",
        "Pass /dev/infiniband into the container (--device=/dev/infiniband, or the resource of the device plug-in), and name the cards to "
        "use with NCCL_IB_HCA.",
    ),
    Words(
        "system_error",
        r"NET/IB : No IP interface found",
        "InfiniBand and RoCE need an IP interface for the first contact, and this node has none that fits.",
        _INTERFACE,
    ),
    Words(
        "system_error",
        r"Failed to open libibverbs|dlv?sym failed on ibv|dlv?sym failed on mlx5|NET/MLX5: (?:Call|lib)|mlx5dv_get_data_direct",
        "The verbs library is missing or too old, so InfiniBand and RoCE cannot be used.",
        "Install libibverbs and the provider of the card (rdma-core) in the image. With Ethernet only, it is not needed.",
        "info",
    ),
    Words(
        "other",
        r"lib wrapper not initialized",
        "An optional library is not loaded, so NCCL does without it.",
        "If InfiniBand or RoCE should be used, install libibverbs (rdma-core) in the image.",
        "info",
    ),
    Words(
        "setting",
        r"incompatible (?:devices?|with the local)|device is incompatible|different (?:link_layer|number of devices=)",
        "Two ranks chose cards that cannot talk to each other: InfiniBand on one side, RoCE on the other, or groups of different size.",
        _LINK_TYPE,
        "error",
    ),
    Words(
        "setting",
        r"OOO RQ is force enabled",
        "Receiving out of order is forced, but a card of the connection does not support it.",
        _OOO,
        "error",
    ),
    Words(
        "setting",
        r"Resiliency (?:is enabled on a \w{1,10} communicator|requires)|NCCL_IB_SUBNET_PREFIX_LEN|plane ID|NET/IB: Ip address"
        r"|message batch size \d{1,9} exceeds",
        "A setting of InfiniBand or RoCE does not fit this machine.",
        "Correct or unset the variable in the line (NCCL_IB_RESILIENCY_PORT_FAILOVER, NCCL_IB_SUBNET_PREFIX_LEN, NCCL_IB_ADDR_RANGE, plane ids).",
    ),
    Words(
        "topology",
        r"FLID configured as zero|ncclIbRoceGetVersionNum",
        "NCCL could not find out how to address the peer's card in its subnet.",
        "Check the subnet manager (its router settings, FLID), and /sys/class/infiniband in the container. On RoCE, set NCCL_IB_GID_INDEX.",
    ),
    Words(
        "system_error",
        r"(?:ibv_|mlx5dv_)\w{1,40}(?:\(\))? (?:failed|returned)",
        "A call of the verbs library failed.",
        "Look for the first error of this process, and check the card (ibstat, dmesg), /dev/infiniband and ulimit -l.",
        "error",
    ),
)

_SOCKETS: tuple[Words, ...] = (
    Words(
        "bootstrap",
        r"no socket interface found|No usable listening interface|NET/Socket : no interface found|no device found (?:matching|after)"
        r"|No interface found in the same subnet",
        "No network interface of this node fits the setting.",
        _INTERFACE,
        "error",
    ),
    Words(
        "setting",
        r"[Uu]nsupported (?:IP|address) family|with family \d{1,6} is neither",
        "NCCL has no address of this node or of rank 0: the interface that a setting names does not exist here or has no address.",
        "Compare NCCL_SOCKET_IFNAME with the interfaces of the node (ip -br addr), and NCCL_SOCKET_FAMILY with their addresses; NCCL_COMM_ID, if "
        "it is set, with the address of rank 0.",
        "error",
    ),
    Words(
        "setting",
        r"Invalid NCCL_COMM_ID|No valid .{0,40}port>? pair|Net : string is null|error encountered when getting address info"
        r"|should not be called when NCCL_COMM_ID",
        "The address of rank 0 is not valid, or its name cannot be resolved on this node.",
        "Correct NCCL_COMM_ID (or unset it) and NCCL_SOCKET_FAMILY; getent hosts NAME shows whether a name can be resolved.",
        "error",
    ),
    Words(
        "connection_refused",
        r"No route to host|Network is unreachable",
        "There is no route to the address of the peer: one of the two chose an interface that the nodes do not share.",
        "Set NCCL_SOCKET_IFNAME on all nodes to the interface on which they reach each other. "
        "Otherwise check firewalls (REJECT also reads as no route) and ip route get ADDRESS.",
        "error",
    ),
    Words(
        "consequence",
        r"Call to (?:recv|send)\b.{0,200} failed.{0,40}timed out",
        "The node at that address does not answer any more: it is down, or the network between the two is broken.",
        "Check that node first (power, dmesg, the scheduler's log), then the interface and the switch.",
    ),
    Words(
        "connection_refused",
        r"(?:^|: )(?i:connect to |connect returned ).{0,200}timed out|exceeded timeouts",
        "Nothing answers at that address: a firewall drops the packets, the node is down, or the address is not of the network that the "
        "nodes share.",
        "Set NCCL_SOCKET_IFNAME on all nodes to the interface on which they reach each other, and open the "
        "firewall between the nodes for all ports.",
        "error",
    ),
    Words(
        "connection_refused",
        r"(?:^|: )(?i:connect to |connect returned )|Call to connect returned|PollConnect to |exceeded retries",
        "The process at that address has ended or has not started yet, or the network blocks the connection.",
        "Look at that process first: did it fail? If the address is not of the network that the nodes share, set "
        "NCCL_SOCKET_IFNAME. Otherwise check firewalls and routes.",
        "error",
    ),
    Words(
        "bootstrap",
        r"wrong (?:magic|type) ",
        "A connection came to a port of this job that was meant for another: of another job, another program, or a node with the same name.",
        "Give each job its own MASTER_PORT and NCCL_COMM_ID, end processes of an earlier run, give nodes different host names, and keep port "
        "scanners away.",
    ),
    Words(
        "system_error",
        r"socketPollConnect poll\(\)|TryAccept: get errno|Accept failed: |TryAccept: exceeded",
        "A connection could not be accepted. The text after it says why.",
        "If a process failed before, this is a consequence. Otherwise check ulimit -n.",
        "error",
    ),
    Words(
        "mismatch",
        r"Bootstrap Root : (?:mismatch|rank|localId)",
        "The ranks do not agree on how many they are, or two have the same number.",
        "Check WORLD_SIZE and RANK of all processes. End processes of an earlier run, and give each job its own MASTER_PORT.",
        "error",
    ),
    Words(
        "mismatch",
        r"(?i:message truncated)",
        "A rank received another size than it expected.",
        "Ranks do not make the same communicators or collectives in the same order, or run with different versions or settings of NCCL. "
        "Compare NCCL's version, NCCL_ALGO, NCCL_PROTO and the order of calls. TORCH_DISTRIBUTED_DEBUG=DETAIL names the first "
        "collective that differs.",
        "error",
    ),
    Words(
        "consequence",
        r"Connection closed by remote peer|Call to (?:recv|send)\b.{0,200} failed|socket progress error|Socket recv failed",
        "This is a consequence: the process at the other end failed or ended first.",
        "Find the process at that address; its log has the reason.",
        "info",
    ),
    Words(
        "setting",
        r"NCCL_SOCKET_NTHREADS|NCCL_NSOCKS_PERTHREAD",
        "A setting for sockets is larger than NCCL allows, and NCCL uses its limit instead.",
        "NCCL_SOCKET_NTHREADS is at most 16, and its product with NCCL_NSOCKS_PERTHREAD at most 64.",
    ),
)

_SERVICE: tuple[Words, ...] = (
    Words(
        "system_error",
        r"Too many open files|[Tt]oo many connections",
        "The process has no file descriptors left for connections.",
        "Raise the limit: ulimit -n 65536 (docker run --ulimit nofile=65536), and look for a program that leaks files or workers.",
        "error",
    ),
    Words(
        "system_error",
        r"\[Service thread\](?! Error .{0,40}=(?:Init|SharedInit|Setup|Connect))|\[Proxy Service \d{1,9}\] Failed to execute operation Close",
        "Service threads lost their peers. This is normal when a job ends, and a sign of a dead rank if training was still running.",
        "Nothing needs to be done if it happened at the end. Otherwise find the rank that failed first.",
        "info",
        is_harmless=True,
    ),
    Words(
        "system_error",
        r"\[Proxy [Ss]ervice|\[Service thread\]|Proxy Call to rank",
        "This is a consequence: NCCL's service thread could not do what a rank asked for.",
        "The reason is in the warning before it, or in the log of the rank that it names.",
        "error",
        is_consequence=True,
    ),
)

NETWORK: tuple[Words, ...] = (*_CARDS, *_SERVICE, *_SOCKETS)
