"""Warnings about versions, settings and the calls of the program."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_SAME = "Use one image or environment on all nodes. Look for a second libnccl in LD_LIBRARY_PATH and in the Python environment."
_DIFFERS = (
    "Look for a branch around the collective that depends on rank or data. TORCH_DISTRIBUTED_DEBUG=DETAIL names the first collective "
    "that differs."
)
_REBUILD = "Build the program with the headers of the NCCL that it runs with, or load that version at run time."
_ORDER = "Check the program: it passes wrong arguments, or calls NCCL in a wrong order. Frameworks: update it, or report the call to its developers."
_SETTING = (
    "Correct or unset the variable that the line names; docs.nvidia.com/deeplearning/nccl lists the valid values."
)
_SYMMETRIC = (
    "Symmetric memory needs ncclMemAlloc, NCCL_CUMEM_ENABLE=1 and GPUs that reach each other over NVLink. NCCL_WIN_ENABLE=0 does without "
    "it: the kernels that need it are not used."
)

_VERSIONS: tuple[Words, ...] = (
    Words(
        "version_mismatch",
        r"Mismatched NCCL version|(?<!library )version mismatch",
        "A communicator cannot mix versions: its init fails.",
        _SAME,
        "error",
    ),
    Words(
        "version_mismatch",
        r"NCCL library (?:version )?(?:is too old|is not backwards)|too old version of NCCL|needs to be recompiled",
        "The program was compiled for another version of NCCL than the one that it runs with.",
        f"{_REBUILD} {_SAME}",
        "error",
    ),
    Words(
        "version_mismatch",
        r"incompatible version \d|backend ?[vV]ersion|argument (?:not|must be) initialized via NCCL_\w{1,60}INITIALIZER",
        "A plug-in or the program was made for another version of NCCL.",
        f"{_REBUILD} Use the plug-in that belongs to this version.",
    ),
)

_RANKS: tuple[Words, ...] = (
    Words(
        "duplicate_gpu",
        r"Duplicate GPU detected|Multiple Ranks are using the same GPU",
        "NCCL refuses to create such a communicator.",
        "Call torch.cuda.set_device(LOCAL_RANK) before the process group is created, and check CUDA_VISIBLE_DEVICES and the number of "
        "processes per node.",
        "error",
    ),
    Words(
        "mismatch",
        r"(?i:mismatched collective|collective mismatch)|mismatch with rank|symmetric registration check failed|registration check failed"
        r"|identical segment configurations|same size on|\bmismatch in (?:rank count|info)",
        "One rank calls a different collective, passes a different size or buffer, or uses a different order: the job hangs, or data is "
        "corrupted.",
        _DIFFERS,
        "error",
    ),
    Words(
        "mismatch",
        r"mixed local (?:Net|CollNet) device counts|does not match the parent|netName \S{1,64} is different"
        r"|number of remote (?:control )?rails|number of rails\. Expected|requires NIC \d{1,9} but|Wrong number of NICs|Detected mixed",
        "Ranks have different numbers or kinds of network devices.",
        "Compare the cards of the nodes (ibstat, fi_info -p efa), NCCL_IB_HCA and NCCL_NET, and the devices that each container "
        "may open. NCCL_IGNORE_NET_MISMATCH=1 only hides this, and the job can hang.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"matching (?:recv|send)|to self without",
        "A rank sends to itself without receiving, or the reverse, so the operation can never finish.",
        "Put both calls into one group: batch_isend_irecv, or ncclGroupStart and ncclGroupEnd.",
        "error",
    ),
)

_USAGE: tuple[Words, ...] = (
    Words(
        "invalid_usage",
        r"before the previous operation returned|previous operation returned ncclSuccess",
        "A nonblocking communicator is used before its init or its last operation has finished.",
        "Wait until ncclCommGetAsyncError no longer returns ncclInProgress. In PyTorch, unset TORCH_NCCL_USE_COMM_NONBLOCKING.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"should be in the 0\.\.-\d{1,10} range",
        "The communicator has no ranks any more: it was destroyed or aborted before this call.",
        "Find the first error of this process. Otherwise the program still uses a communicator after its end: create a new one first.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"already been destroyed|communicator was revoked|corrupted comm object|[Cc]ould not find communicator|invalid communicator passed"
        r"|in abort state",
        "A communicator is used after it was destroyed, aborted or revoked.",
        "Find the first error of this process. Otherwise do not use a process group after destroy_process_group or abort, and destroy it once.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"Fatal: host threads racing",
        "Several threads of one process launch NCCL's kernels on the same GPU at once.",
        "Use one thread per GPU, or a lock around the calls. Unset NCCL_LAUNCH_RACE_FATAL if the order is guaranteed otherwise.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"uncaptured or all captured|can be CUDA graph captured|captured in a graph|captured by the expected graph"
        r"|communicators in graph mode|mixing different streams|Blocking and nonblocking|graphStreamOrdering=0",
        "Calls of one group mix streams that a CUDA graph captures with others, or kinds of communicators.",
        "Capture all calls of a group in the same graph, and begin and end the group inside it.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"allocated on device \d{1,9} mismatch|is not a valid pointer|argument is NULL|invalid pointer|NULL user pointer|is NULL$",
        "A buffer is missing, is no memory of this GPU, or belongs to another GPU than the communicator.",
        "Call torch.cuda.set_device(LOCAL_RANK) first, and pass tensors that are contiguous and on that GPU.",
        "error",
        r"argcheck|enqueue|collectives|dev_runtime|^$",
    ),
    Words(
        "invalid_usage",
        r": invalid (?:root|type|reduction operation)|reduction operation \d{1,9} unknown|ncclRedOp\w{0,30} :|FP8 reduction support"
        r"|user-created ncclRedOp|unsupported collective",
        "A call has a root, a type or a reduction that this communicator or this GPU does not support.",
        "Check the arguments of the call: the root counts within the group, and FP8 needs GPUs from sm90 on.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"[Ii]nvalid (?:rank (?:requested|specified)|device \d|device count)|improper usage of|rank \d{1,9} exceeds|ncclCommGrow:"
        r"|ncclGroupEnd: not|bcastGrowHandle",
        "A communicator is created with ranks or devices that do not fit together.",
        "Check RANK, WORLD_SIZE, LOCAL_RANK and the number of GPUs that the process sees (CUDA_VISIBLE_DEVICES).",
        "error",
    ),
    Words(
        "invalid_usage",
        r"[Tt]oo many (?:async|aggregated|collectives|work elements)",
        "One group has more operations than this version of NCCL allows.",
        "Use smaller groups, or a newer version of NCCL.",
        "error",
    ),
    Words(
        "invalid_usage",
        r"ncclPutSignal|ncclSignal:|ncclWaitSignal|is invalid \(must be 0\)|within valid range of ranks|valid lsaSize"
        r"|member of the LSA team|needs to be valid|size=\w{1,18} extends|RMA (?:CE )?is not init|matching window|GIN resources"
        r"|did not request GIN|worldGinBarrier",
        "A call of the interface for one-sided communication or for kernels has wrong arguments.",
        _ORDER,
        "error",
    ),
    Words(
        "invalid_usage",
        r"MemManager: (?:Already suspended|Not in suspended|Suspend|Resume|MemStats)|Memory (?:suspend|resume) not supported",
        "Memory of a communicator cannot be given back or taken up again at this point.",
        "Suspend and resume in turn, on all ranks, without split_share communicators, and with NCCL_DISABLE_MEM_MANAGER unset.",
        "error",
    ),
)

_SETTINGS: tuple[Words, ...] = (
    Words(
        "setting",
        r"[Nn]o algorithm/protocol available|no symmetric kernel available",
        "NCCL_ALGO and NCCL_PROTO leave no way to run this collective.",
        "Unset NCCL_ALGO and NCCL_PROTO, or add Ring to NCCL_ALGO and Simple to NCCL_PROTO.",
        "error",
    ),
    Words(
        "setting",
        r"[Uu]nrecognized (?:element|prefix) token|entries except the first must have a prefix|NCCL_NET_MERGE_POLICY|NCCL_NET_FORCE_MERGE"
        r"|fused NIC|Only matched \d{1,9} devices|netDevs policy|network devices = -?\d{1,9} for policy|[Mm]erg(?:e|ing) (?:too many"
        r"|multiple|incompatible|net|virtual)|find net with name|Fusing NET",
        "A list of algorithms, protocols or network devices in the environment is not valid here.",
        "Correct or unset NCCL_ALGO, NCCL_PROTO, NCCL_NETDEVS_POLICY, NCCL_NET_MERGE_LEVEL or NCCL_NET_FORCE_MERGE.",
    ),
    Words(
        "setting",
        r"Invali[dg] config|Invalid NCCL_|is being ignored because|is ignored due to|Unsetting|is too small\. Minimum|is too big\. Limiting"
        r"|Invalid \S{1,40} -?\d{1,9} \(m|User asked for a (?:min|max)imum|[Cc][Tt][Aa]s -?\d{1,9} is larger|is not a valid value"
        r"|Ignoring SHM locality|invalid netGdrLevel|Duplicate (?:option|registration)|set to invalid value|has invalid value",
        "A setting has a value that NCCL does not accept; it uses its own instead, or fails.",
        _SETTING,
    ),
    Words(
        "setting",
        r"CC On, Multi-GPU CC Off",
        "Confidential computing protects each GPU, but not the data between GPUs.",
        "Nothing needs to be done for the job. Protected PCIe or Multi-GPU CC of the driver covers these links, too.",
        "info",
        is_harmless=True,
    ),
    Words(
        "setting",
        r"NPKIT|NPKit|NUMA auto balancing|Missing \"HSA_FORCE",
        "A setting of the system or of RCCL makes collectives slower or uneven.",
        "Set what the line names: sysctl kernel.numa_balancing=0, HSA_FORCE_FINE_GRAIN_PCIE=1, NPKIT_DUMP_DIR.",
        "info",
    ),
    Words(
        "setting",
        r"NCCL_GIN_NCONTEXTS|IB device \S{1,64} not found|support GDAKI|plugin v\d{1,3} does not|GIN_IB_PROXY|GIN is disabled|no GIN"
        r"|No (?:GIN|RMA)-capable|(?:GIN|RMA) not supported|do(?:es)? not support (?:symmetric|multimem|RMA)"
        r"|not all ranks in the communicator support GIN|NCCL_GIN_CONNECTION|host RMA is not supported|(?:[Rr]ma|[Gg]in) connect"
        r"|backend type mismatch|device type mismatch|strong signals|VA signals|plugin does not support|requires GIN PROXY"
        r"|currently does not support VAs|Hierarchical CE|RMA backend not found",
        "The program uses device-side or one-sided communication, which this machine, its network plug-in or a setting does not allow.",
        f"Check NCCL_GIN_ENABLE, NCCL_GIN_TYPE and the network (GIN needs InfiniBand or a plug-in with GIN). {_SYMMETRIC}",
    ),
)

CALLS: tuple[Words, ...] = (*_VERSIONS, *_RANKS, *_USAGE, *_SETTINGS)
