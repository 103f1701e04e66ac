"""Warnings about versions, settings and the calls of the program."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

CALLS: tuple[Words, ...] = (
    Words(
        "version_mismatch",
        r"Mismatched NCCL version|version mismatch",
        "A communicator cannot mix versions: its init fails.",
        "Use one image or environment on all nodes. Look for a second libnccl in LD_LIBRARY_PATH.",
        "error",
    ),
    Words(
        "duplicate_gpu",
        r"Duplicate GPU detected|Multiple Ranks are using the same GPU",
        "NCCL refuses to create such a communicator.",
        "Call torch.cuda.set_device(LOCAL_RANK) before the process group is created, and check CUDA_VISIBLE_DEVICES and the number of "
        "processes per node.",
        "error",
    ),
)
