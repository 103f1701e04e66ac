"""Accelerate; the argument is the way it is started: ``launch`` (``accelerate launch``) or ``notebook``."""

import os
import sys

import torch
from accelerate import Accelerator, notebook_launcher
from common import batches, made, show, tell
from torch import nn
from torch.utils.data import DataLoader


def train() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    net, optimizer = accelerator.prepare(net, optimizer)
    steps = 0
    for x, y in DataLoader(batches(accelerator.process_index), batch_size=None):
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        show(accelerator.gather(loss.detach()).mean())
    tell(steps)
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1] == "notebook":
        notebook_launcher(train, num_processes=2, use_port=os.environ["MASTER_PORT"])
    else:
        train()
