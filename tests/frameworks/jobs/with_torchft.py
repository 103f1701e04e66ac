"""torchft: two replica groups of one process each, each under its own torchrun, and a lighthouse that coordinates them."""

import os
import subprocess
import sys

import torch
import torchft
from common import STEPS, batches, made, show, tell
from torch import nn
from torchft.coordination import LighthouseServer


def train(replica: int) -> None:
    torch.set_num_threads(1)
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        min_replica_size=2,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
    )
    model, updates = torchft.DistributedDataParallel(manager, net), torchft.Optimizer(manager, optimizer)
    data = batches(replica)
    while manager.current_step() < STEPS:
        x, y = data[manager.current_step()]
        updates.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        updates.step()
        show(loss.detach(), replica)
    tell(manager.current_step(), replica)
    manager.shutdown()


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    address = lighthouse.address()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
    ]
    replicas = []
    for replica in range(2):
        command = [*torchrun, "127.0.0.1:0", __file__, str(replica)]
        replicas.append(subprocess.Popen(command, env={**os.environ, "TORCHFT_LIGHTHOUSE": address}))
    codes = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    sys.exit(max(codes))


if __name__ == "__main__":
    train(int(sys.argv[1])) if len(sys.argv) > 1 else main()
