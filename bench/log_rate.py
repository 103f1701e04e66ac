"""Megabytes a second of NCCL's debug output that one core turns into an account and findings, and the memory it takes.

The log is made up, a megabyte for each of many jobs, with the line mix of real logs (counted over 39 of them, NCCL 2.7 to
2.29): no two jobs share a process or a communicator. Give a number of megabytes to read another amount than 256.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, memory_mb
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.input.lines import lines_of

MEGABYTES = 256
RANKS = 32


#: Template -> weight.
MIX = {
    "{who} Channel {c:02d}/0 : {r}[{d}] -> {n}[{e}] via P2P/CUMEM": 34,
    "{who} Channel {c:02d}/0 : {r}[{d}] -> {f}[{d}] [send] via NET/IB/{d}/GDRDMA": 15,
    "step {x}: loss 3.{x}, 12.{c} samples/s": 16,
    "": 12,
    "{who} Channel {c:02d}/32 :    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  {c}": 5,
    "{who} Connected all rings": 3,
    "{who} threadThresholds 8/8/64 | 256/8/64 | 512 | 512": 3,
    "{who} NET/Plugin : No plugin found (libnccl-net.so), using internal implementation": 3,
    "{who} Trees [0] {n}/-1/-1->{r}->{f} [1] {n}/-1/-1->{r}->{f} [2] {n}/-1/-1->{r}->{f} [3] {n}/-1/-1->{r}->{f}": 2,
    "{who} AllReduce: opCount {x:x} sendbuff 0x7f4{x:x} recvbuff 0x7f4{x:x} count {x} datatype 7 op 0 root 0 "
    "comm 0x55d5f5ac09e0 [nranks=32] stream 0x55d5f5a0": 2,
    "{who} ncclCommInitRank comm 0x55{job:06x} rank {r} nranks 32 cudaDev {d} nvmlDev {d} busId {r}000 commId 0xebe3{job:x} "
    "- Init START": 2,
    "{who} NCCL_SOCKET_IFNAME set by environment to ib0,ib1": 2,
    "{who} NET/IB : GPU Direct RDMA Enabled for HCA {d} 'mlx5_{d}'": 1,
}


def _lines(chance: random.Random, job: int) -> Iterator[str]:
    for template in chance.choices(list(MIX), list(MIX.values()), k=9_000):
        r = chance.randrange(RANKS)
        pid = job * RANKS + r
        following, far = (r + 1) % RANKS, (r + 8) % RANKS
        where = {"r": r, "d": r % 8, "n": following, "e": following % 8, "f": far, "job": job}
        who = f"node{r // 8:02d}:{pid}:{pid + 5} [{r % 8}] NCCL INFO"
        yield template.format(who=who, c=chance.randrange(24), x=chance.randrange(1 << 20), **where)


class Log(io.BufferedIOBase):
    """A log of so many bytes that is made while it is read."""

    def __init__(self, size: int) -> None:
        self.left, self._job, self.making_s = size, 0, 0.0
        self._chance = random.Random(7)  # noqa: S311 - nothing secret

    def read1(self, _: int = -1) -> bytes:
        """The next job, or nothing."""
        if self.left <= 0:
            return b""
        begin = time.process_time()
        self._job += 1
        data = ("\n".join(_lines(self._chance, self._job)) + "\n").encode()
        self.left -= len(data)
        self.making_s += time.process_time() - begin
        return data


def main() -> None:
    """Measure and print."""
    size = int(float(sys.argv[1]) if len(sys.argv) > 1 else MEGABYTES) * 10**6
    gc.disable()  # as the command does
    before, begin = memory_mb(), time.process_time()
    log, account = Log(size), Account()
    account.add_lines(lines_of(log), "log")
    used = time.process_time() - begin - log.making_s
    begin = time.process_time()
    found = findings(account)
    emit(
        {
            "mb_per_s": size / 1e6 / used,
            "mb": size / 1e6,
            "findings": len(found),
            "findings_s": time.process_time() - begin,
            "memory_mb": memory_mb(field="VmHWM") - before,
            "overflow": account.overflow,
        }
    )


if __name__ == "__main__":
    main()
