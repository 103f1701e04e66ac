"""A number of all_reduces, at a pace; ``--kill-rank R --kill-at N``: rank R kills itself before operation N, or raises."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--kill-after", default="", help="not before this file exists")
    parser.add_argument("--raise", dest="raises", action="store_true", help="an exception instead of SIGKILL")
    parser.add_argument("--until", default="", help="go on until this file exists")
    parser.add_argument(
        "--fail-first", type=int, default=-1, help="a rank that raises before it has come to the others"
    )
    arguments = parser.parse_args()
    if os.environ["RANK"] == str(arguments.fail_first):
        raise LookupError("no device")
    rank, _ = begin()
    done, more = 0, torch.ones(1)
    while True:
        for _ in range(arguments.count):
            if (rank, done) == (arguments.kill_rank, arguments.kill_at):
                while arguments.kill_after and not Path(arguments.kill_after).exists():
                    time.sleep(0.01)
                if arguments.raises:
                    raise LookupError("no data")
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(16))
            done += 1
            time.sleep(arguments.pause)
        # All ranks have to agree on when to stop.
        more.fill_(float(bool(arguments.until) and not Path(arguments.until).exists()))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more.item():
            break
    if rank == 0:
        print("count", done, flush=True)
    end()


if __name__ == "__main__":
    main()
