"""The probe goes in and out while threads communicate; argument: how often. Says what the process holds, before and after."""

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from common import say

import commwatch

#: Of malloc.h.
M_ARENA_MAX = -8


def held() -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text()
    files = {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("fd", "task")}
    # Its own memory: of torch's libraries the kernel maps more or less as it likes.
    return {**files, "kib": int(status["RssAnon"].split()[0]), "rings": maps.count(".ring")}


def main() -> None:
    # Threads that begin at the same moment would have an arena each, and each arena keeps some free memory: the busier the machine, the more.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    over = threading.Event()

    def fake(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(4)
        while not over.is_set():
            dist.all_reduce(tensor, group=group)

    def gloo(group: dist.ProcessGroup) -> None:
        while not over.is_set():
            works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(4)]
            works.append(dist.reduce_scatter(torch.ones(4), [torch.ones(4)], group=group, async_op=True))
            for work in works:
                work.wait()

    sys.setswitchinterval(0.0002)  # five threads and one GIL
    groups = [dist.new_group([0], backend=backend) for backend in ("fake", "fake", "gloo", "fake")]
    threads = [
        threading.Thread(target=target, args=(group,), daemon=True)
        for target, group in zip((fake, fake, gloo), groups, strict=False)
    ]
    for thread in threads:
        thread.start()

    def cycle() -> None:
        assert commwatch.install()
        dist.all_reduce(torch.ones(8), group=groups[-1])
        commwatch.uninstall()

    for _ in range(50):
        cycle()
    before = held()
    for _ in range(int(sys.argv[1]) - 50):
        cycle()
    after = held()
    over.set()
    for thread in threads:
        thread.join()
    say([before, after])
    dist.destroy_process_group()
    os.write(1, b"job done\n")


if __name__ == "__main__":
    main()
