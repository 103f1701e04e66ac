"""Keep the memory of a process with many threads small."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

#: Parameter of glibc's ``mallopt``.
_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Give all threads of this process one heap, and numpy no threads; call it before there are threads or numpy.

    By default, glibc keeps a heap for each thread, up to eight for each core, with what that thread has freed; and OpenBLAS, whose
    functions are not used, starts a thread for each core. Without glibc the heaps are those of the C library.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
