"""Two ranks in asynchronous operations, for which rank 0 waits in some ways; the probe does not see all. Rank 1 joins each when rank 0 is ready.

The number of elements shows which is which: 1: it is blocked in ``wait``; 2: it waits when all is over; 3: by the future; 4: it asks until it is
over; 5: it drops the handle; 6: a blocking call; 7: as 1, with a functional collective; 8 and 9: two at a time, and it waits for the first.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

#: So long rank 0 surely takes from its word to its wait.
SOON_S = 0.2


def reduced(elements: int) -> Any:
    return dist.all_reduce(torch.ones(elements), async_op=True)


def first(case: int, ready: Callable[[], None], over: Callable[[], None]) -> None:
    """What rank 0 does; ``over`` returns when rank 1 has left its operations."""
    if case == 6:
        ready()
        dist.all_reduce(torch.ones(case))
    elif case == 7:
        result = functional.all_reduce(torch.ones(case), "sum", [0, 1])
        ready()
        functional.wait_tensor(result)
    elif case == 5:
        reduced(case)
        ready()
        over()
    else:
        works = [reduced(elements) for elements in ((8, 9) if case == 8 else (case,))]
        ready()
        if case == 2:
            over()
        elif case == 3:
            works.pop().get_future().wait()
        while case == 4 and not works[0].is_completed():
            pass
        for work in works:
            work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # before, the probe reads its names
    for case in range(1, 9):
        ready, over = f"ready {case}", f"over {case}"
        if dist.get_rank() == 0:
            first(case, lambda ready=ready: store.set(ready, ""), lambda over=over: store.wait([over]))  # type: ignore[misc]
            continue
        store.wait([ready])
        time.sleep(SOON_S)
        for elements in (8, 9) if case == 8 else (case,):
            dist.all_reduce(torch.ones(elements))
        store.set(over, "")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
