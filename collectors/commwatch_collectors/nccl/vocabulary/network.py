"""Warnings about InfiniBand, RoCE, sockets and the start of the job."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_IB_OFF = "NCCL_IB_DISABLE=1 does without the cards: TCP sockets reach a small part of their bandwidth."

NETWORK: tuple[Words, ...] = (
    Words(
        "ib_completion_error",
        r"Got completion",
        "The communicator is unusable from here on; the job has to be restarted.",
        "Status 12: check the peer first (did it crash?), then the link (ibstat, error counters), and on RoCE NCCL_IB_GID_INDEX and "
        "flow control. Only then raise NCCL_IB_TIMEOUT. Status 5 alone: find the request that failed first.",
        "error",
    ),
    Words(
        "system_error",
        r"ibv_modify_qp failed",
        "The two cards could not be connected: the address (GID) does not exist on this port, or there is no path to the peer.",
        "Remove NCCL_IB_GID_INDEX if it is set: the right index differs between nodes and changes at a reboot (show_gids lists them). "
        "In a container on RoCE, pass the network interface of the card in as well (--net=host). Check that the peer's address can be "
        "reached from this card (ping -I), and choose the cards of one network with NCCL_IB_HCA.",
        "error",
    ),
    Words(
        "system_error",
        r"ibv_(?:create_cq|create_qp|reg_mr|reg_dmabuf_mr|alloc_pd)\w{0,20} failed",
        "The card could not lock or register the memory that it needs.",
        "Raise the limit of locked memory: ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in the service of "
        "the container runtime or Slurm). For registration of GPU memory, load nvidia-peermem or use DMA-BUF.",
        "error",
    ),
    Words(
        "bootstrap",
        r"no socket interface found|No usable listening interface|no interface found|no device found (?:matching|after)",
        "No network interface of this node fits the setting, so NCCL cannot start.",
        "Compare NCCL_SOCKET_IFNAME (or NCCL_OOB_NET_IFNAME) with the interfaces of the node: ip -br addr. In a container, only its own "
        "interfaces count. Unset it, or use a prefix that fits all nodes.",
        "error",
    ),
    Words(
        "connection_refused",
        r"(?:^|: )(?i:connect to |connect returned )|Call to connect returned|ncclOsSocketPollConnect to ",
        "The peer's process does not run, another job has its port, or the network blocks the connection.",
        "Look at the process with that address first: did it fail? If the address is of docker0 (172.17.…) or another network that the "
        "nodes do not share, set NCCL_SOCKET_IFNAME to the interface that they do. Otherwise check firewalls and routes (ip route get).",
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
)
