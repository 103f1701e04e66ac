"""Classes of warnings: every form that any version prints is in its class, and the first match wins."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl.classes import OTHER, warning_class

AT = "10.0.0.7<4411>"
WARNINGS = {
    "connection_refused": [
        f"Connect to {AT} failed : Connection refused",
        f"Net : Connect to {AT} failed : No route to host",
        f"socketStartConnect: Connect to {AT} failed : Software caused connection abort",
        "socketPollConnect: Connect to 10.0.0.7 returned 113(No route to host) errno 115(Operation now in progress)",
        f"socketFinalizeConnect: Connect to {AT} failed : Connection timed out",
        "socketStartConnect: connect returned Connection refused, exceeded error retry count (35)",
        f"socketPollConnect: connect to {AT} returned Connection timed out, exceeded error retry count after 35 attempts",
        f"ncclOsSocketPollConnect: connect to {AT} returned Connection refused, exceeded error retry count after 35 attempts",
    ],
    "ib_completion_error": [
        "NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129",
        f"NET/IB : Got completion from peer {AT} with error 5, opcode 0, len 0, vendor err 244",
        f"NET/IB : Got completion from peer {AT} with error 12, opcode 32614, len 32614, vendor err 129 (Send) localGid fe80::1",
        f"NET/IB : Got completion from peer {AT} with status=9 opcode=1 len=0 vendor err 138 (Recv)",
        "NET/IB: Got completion from peer gpu-b1<4411> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_2",
        f"NET/IB: Got completion from peer {AT} with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 req_type=Send",
    ],
    "ib_async_event": [
        "NET/IB : Got async event : port error",
        "NET/IB : mlx5_2:1 Got async event : client reregistration",
        "NET/IB : mlx5_2:1 Got async error event: local catastrophic error",
        "NET/IB : mlx5_2:1 async fatal event on QP (0x7f): local access violation",
        "NET/IB : mlx5_2:1 async fatal event: device fatal",
        "NET/IB : mlx5_2:1 Got non-fatal async event: port active(9)",
        "NET/IB : mlx5_2:1 GID table changed",
    ],
    "cuda_error": [
        "Cuda failure 'out of memory'",
        "Cuda failure 999 'unknown error'",
        "HIP failure 'out of memory'",
        "hipMemcpy(dst, src) failed : Cuda failure",
        "commDestroySync: comm 0x5a rank 3 sync deviceStream error 2",
    ],
    "mismatch": [
        "Mismatched collective detected, please check your collective calls at and around rank 1.",
        "Your program may be hanging, this may be caused by a collective mismatch around rank 1.",
        "NET/IB : collective mismatch error, local size 4 remote size 8",
        f"NET/Socket : peer {AT} message truncated : receiving 8 bytes instead of 4. If you believe otherwise",
        "Bootstrap Root : mismatch in rank count from procs 8 : 16",
        "Symmetric registration of buffer 3: size mismatch with rank 0",
    ],
    "version_mismatch": [
        "Mismatched NCCL version detected : rank 0 version 22304 rank 1 version 22005",
        "NCCL version mismatch with remote peer 10.0.0.7 (local: 22703, remote 22807)",
    ],
    "duplicate_gpu": ["Duplicate GPU detected : rank 3 and rank 1 both on CUDA device 2b000"],
    "system_error": [
        "NET/IB :SHARP coll init error: Cannot create SHArP job(-11)",
        "NET/IB : SHARP coll init error: No such thing(-2)",
        "Call to ibv_reg_mr failed",
        "Call to ibv_modify_qp failed with error Connection timed out errno 110",
        "Call to bind failed : Address already in use",
        "NET/IB : Unable to open device mlx5_2",
        "[Service thread] Accept failed Resource temporarily unavailable",
        "[Service thread] Could not receive type from localRank 3",
        "[Service thread] Could not receive type from localRank 3, res=3, closed=0",
        "[Proxy Service 3] Failed to execute operation Close from rank 3, retcode 3",
    ],
    "timeout": ["NET/OFI Request 0x5 completed with error. RC: 110. Error: operation timed out", "Bootstrap timeout after 60 s"],
    "peer_to_peer": ["P2P is disabled between NVLINK connected GPUs 1 and 0."],
    "network_plugin": ["NET/OFI Request 0x5 completed with error. RC: 5. Error: unreachable"],
    OTHER: [
        f"Net : Connection closed by remote peer {AT}",
        f"socketProgress: Connection closed by remote peer gpu-b1{AT}",
        "Call to recv failed : Connection reset by peer",
        f"Net : Call to recv from {AT} failed : Connection reset by peer",
        f"socketProgressOpt: Call to recv from {AT} failed : Broken pipe",
        f"socketProgressOpt: Call to send {AT} failed : Broken pipe",
        f"ncclOsSocketProgressOpt: Call to recv {AT} failed : Connection reset by peer",
        "Cannot initialize CollNet, using point-to-point network instead",
        "MSCCL++: Cannot enable MSCCL++; environment is not MSCCL compatible",
        'Missing "iommu=pt" from kernel command line which can lead to system instability',
        "lib wrapper not initialized.",
        "",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in WARNINGS.items() for text in texts])
def test_classes(kind: str, text: str) -> None:
    """Every form of a warning is in its class; a closed peer connection is a symptom, and has no class of its own."""
    assert warning_class(text) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Got completion after an async fatal event", "ib_completion_error"),
        ("socketPollConnect: connect to a returned Connection timed out, exceeded", "connection_refused"),
        ("Call to ibv_poll failed: timeout", "system_error"),
        ("Cuda failure 'launch timed out'", "cuda_error"),
        ("collective mismatch: version mismatch", "version_mismatch"),
    ],
)
def test_precedence(text: str, kind: str) -> None:
    """Where two classes fit, the first counts."""
    assert warning_class(text) == kind


def test_long_text() -> None:
    """A text of any length has a class."""
    assert warning_class("Got " * 20_000) == OTHER
    assert warning_class("Cuda failure '" + "x" * 100_000) == "cuda_error"
