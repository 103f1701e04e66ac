"""What trainers do that could trip a probe: worker processes, operations that raise, threads, a late uninstall."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import begin, end, say
from torch.utils.data import DataLoader

import commwatch


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """0, 1, 2, ..."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def main() -> None:
    _, world = begin()
    dist.all_reduce(torch.ones(4))
    total = 0.0
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        dist.all_reduce(batch)
        total += batch.sum().item()
    raised = []
    complex_numbers = torch.ones(2, dtype=torch.complex64)
    wrongs: list[Callable[[], object]] = [
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(4)),
        lambda: dist.all_reduce(complex_numbers, op=dist.ReduceOp.MAX),
    ]
    for wrong in wrongs:
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            raised.append(type(error).__name__)
    groups = [dist.new_group(list(range(world))) for _ in range(4)]

    def work(group: dist.ProcessGroup) -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(8), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(8)]
    commwatch.uninstall()
    for pending in works:
        pending.wait()
    dist.all_reduce(torch.ones(8))
    say([total, raised])
    end()


if __name__ == "__main__":
    main()
