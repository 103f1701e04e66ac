"""What people call each kind of incident, and what they can do about it: the texts of all views. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from commwatch_alerts.text import render

#: By kind.
TITLES: Mapping[str, str] = {
    "hang": "Hang",
    "stalled": "Stall",
    "waiting": "Long wait",
    "desync": "Ranks disagree",
    "rank_lost": "Rank died",
    "straggler": "Late rank",
    "uneven_work": "Uneven work",
    "comm_bound": "High communication share",
    "exposed_comm": "Compute waits for communication",
    "slow_link": "Slow link",
    "link_saturated": "Saturated link",
    "bandwidth_low": "Slow operation",
    "corruption": "Corrupt data",
    "nccl_fault": "Communication fault",
    "gpu_fault": "GPU fault",
    "gpu_underused": "Idle GPUs",
    "network_fault": "Network fault",
    "init_incomplete": "Missing rank",
    "capture_incomplete": "Incomplete recording",
    "agent_fault": "Agent fault",
}

_DEAD = (
    "Read the end of that rank's own log, and the kernel's log of its node (`dmesg`) for the OOM killer or an Xid. "
    "The other ranks cannot go on without it: start the job again from its last checkpoint."
)
_LEFT = (
    "Compare the number of steps and batches of the ranks: a rank that has less data leaves the loop first. "
    "Pad the data, drop the last uneven batches, or use `Join` of torch.distributed.algorithms."
)
_STOPPED = "Find out who suspended the process (SIGSTOP: a debugger, a shell's job control, an administrator)[, and let it continue: `kill -CONT {pid}`]."
_CODE = (
    "Look at what that rank executes[: {place}]. Typical are work on one rank only (checkpoint, evaluation, logging), a slow loader, and "
    "a branch that not all ranks take."
)
_PATH = (
    "Check the network between the ranks that are inside: addresses and interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewalls, "
    "link errors. `commwatch doctor` checks a node; `commwatch explain` reads NCCL's log."
)
_REPLICA = (
    "Stop before the next checkpoint is saved, and continue from one that was saved before this. Test the GPU and memory of that rank's "
    "node before it is used again."
)
#: By kind and cause; with an empty cause, those of all others of the kind. Templates of ``text.py``.
_REMEDIES: Mapping[tuple[str, str], str] = {
    ("hang", "dead"): _DEAD,
    ("hang", "gone"): _LEFT,
    ("hang", "destroyed"): "Let all ranks leave a group together: call `destroy_process_group` only after the last collective of every rank.",
    ("hang", "stopped"): _STOPPED,
    ("hang", "not_joined"): _CODE,
    ("hang", ""): _PATH,
    ("stalled", "not_come"): "Check that all ranks were started, and read the log of that rank: it may have failed before it came to init_process_group.",
    ("stalled", "unseen"): "Start an agent on the node of that rank, or name it under `peers`, if one runs there.",
    ("stalled", "stuck"): _PATH,
    ("stalled", ""): _CODE,
    ("waiting", ""): "Nothing, if the job is meant to wait here: for requests, rollouts, a checkpoint, compilation. A wait that lasts longer than the "
    "job has shown before becomes a stall.",
    ("desync", "ops"): "Look for a branch on the rank, or on data of the rank, before that "
    "operation: all ranks must call the same collectives in the same order.",
    ("desync", "root"): "Pass the same `src` or `dst` on all ranks.",
    ("desync", "sizes"): "Give all ranks tensors of one size and dtype: pad uneven batches, or gather the sizes first.",
    ("desync", "splits"): "Let each rank pass as `output_split_sizes` what the others pass as `input_split_sizes` for it: exchange the sizes first.",
    ("desync", "order"): "Let all ranks use their groups in one order, and let of two ranks one send while the other receives: "
    "ranks that wait for each other wait until the time-out.",
    ("rank_lost", "exception"): "Look for that exception[ in {place}] in the log of that rank. Errors of other ranks after it may only follow from it.",
    ("rank_lost", "out_of_memory"): "Use less memory on that rank[, in {place}]: smaller micro-batches, activation checkpointing, or sharding.",
    ("rank_lost", "all"): "Look at the launcher's log: it, the scheduler or a user has ended all ranks at once.",
    ("rank_lost", "interrupted"): "A signal from a keyboard, a launcher or a scheduler has ended the job; nothing is to be mended.",
    ("rank_lost", ""): _DEAD,
    ("straggler", "no_core"): "Give that rank a core of its own: fewer ranks, loader workers or threads (OMP_NUM_THREADS) on its node, or other "
    "processes elsewhere. `top` on the node shows what uses its cores.",
    ("straggler", "quota"): "Raise the CPU quota of that rank's container or cgroup, or use fewer threads in it (OMP_NUM_THREADS, loader workers).",
    ("straggler", "throttled"): "Look at the power and the cooling of that rank's GPU: `nvidia-smi -q -d PERFORMANCE` shows why its clock is lowered.",
    ("straggler", "computes"): "[Look first at {place}: that rank spends its time there. ]It computes longer than the others: compare the batch and the "
    "sequence lengths that it has with theirs, and look for work that only it does.",
    ("straggler", "idle"): "[Look first at {place}: that rank spends its time there. ]It waits instead of computing: look for a slow loader or disk, a "
    "sleep, a lock, and for what its GPU or another of its threads does meanwhile.",
    ("straggler", "pages"): "[Look first at {place}: that rank spends its time there. ]It reads memory from disk: if its node swaps, give it more memory; "
    "otherwise a memory-mapped file is on a slow disk, or read there for the first time.",
    ("straggler", ""): "Look at what that rank does before its collectives[: {place}]. Typical are "
    "a slow loader, more work than the others have, and a busy or throttled node.",
    ("uneven_work", ""): "Give all ranks the same work in each step: sort or pack sequences by length, balance experts, and "
    "divide what one rank does for all.",
    ("comm_bound", ""): "`commwatch report[ {job}]` has the parts of the communication, and what to try with the gain of each.",
    ("exposed_comm", ""): "Increase the overlap: prefetching in FSDP, bucket sizes in DDP, "
    "asynchronous operations. `commwatch report[ {job}]` has the gain of each.",
    ("slow_link", ""): _PATH,
    ("link_saturated", ""): "Use more links, or send less: keep tensor parallelism inside a node, accumulate gradients, move other traffic elsewhere.",
    ("bandwidth_low", ""): "Compare with `commwatch bench` on the same nodes; `commwatch explain` shows the paths that NCCL chose.",
    ("corruption", ""): _REPLICA,
    ("nccl_fault", ""): "`commwatch explain` shows the lines of the log, what they mean and what to do.",
    ("gpu_fault", ""): "Take the node out of the job, and read its kernel log (`dmesg`) and `nvidia-smi -q` of that GPU.",
    ("gpu_underused", ""): "Look for what the GPUs wait for: `commwatch report[ {job}]` separates communication from the input pipeline.",
    ("network_fault", ""): "Check cable, transceiver and switch port of that device: `ethtool -S`, or `ibdiagnet` for InfiniBand.",
    ("init_incomplete", "dead"): _DEAD,
    ("init_incomplete", "gone"): _LEFT,
    ("init_incomplete", "stopped"): _STOPPED,
    ("init_incomplete", "stuck"): _PATH,
    ("init_incomplete", "not_come"): "All ranks must make the same groups in the same order, and one must set each key that others wait for. " + _CODE,
    ("init_incomplete", ""): "Check that all ranks were started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE.",
    ("capture_incomplete", ""): "Start the agent before the job, use a larger ring (COMMWATCH_SLOTS), or the native hook; docs/hooks.md has the costs.",
    ("agent_fault", ""): "The agent's log has the reason; `commwatch doctor` checks the node.",
}  # fmt: skip


def remedy(kind: str, cause: str, about: Mapping[str, str]) -> str:
    """Return what to do about an incident, as one or two sentences; empty for an unknown kind.

    Args:
        about: what is known of ``pid``, ``place`` (of the code) and ``job``; others are left out of the text.
    """
    text = _REMEDIES.get((kind, cause)) or _REMEDIES.get((kind, ""), "")
    return render(text, about, 0.0, {})
