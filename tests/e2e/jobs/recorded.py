"""Two ranks that dump PyTorch's Flight Recorder, pickled and as JSON, while one of them has not come; argument: the folder."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end, say
from torch._C import _distributed_c10d as c10d


def dump(folder: Path, rank: int) -> None:
    (folder / f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    hidden = folder / f"hidden_{rank}"
    hidden.write_bytes(c10d._dump_fr_trace())  # type: ignore[attr-defined]
    hidden.rename(folder / f"trace_{rank}")


def wait_until_noted() -> None:
    """The recorder notes the end of an operation a moment after its caller has it, in each group by itself."""
    while not all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]):  # type: ignore[attr-defined]
        time.sleep(0.01)


def main() -> None:
    rank, _ = begin()
    folder = Path(sys.argv[1])
    twin = dist.new_group([0, 1], group_desc="twin")
    for _ in range(3):
        dist.all_reduce(torch.ones(5, 3))
    dist.all_gather([torch.zeros(7) for _ in range(2)], torch.ones(7), group=twin)
    wait_until_noted()
    if rank == 0:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        dump(folder, rank)
        assert work is not None
        work.wait()
    else:
        while not (folder / "trace_0").exists():
            time.sleep(0.01)
        dump(folder, rank)
        dist.all_reduce(torch.ones(8))
    say(str(torch.__version__))
    end()


if __name__ == "__main__":
    main()
