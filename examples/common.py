"""What the examples share: the device and backend this machine has, and a small model."""

import os

import torch
import torch.distributed as dist
from torch import nn


def start() -> torch.device:
    """Join the job torchrun started: NCCL where there is a GPU for each local rank, else Gloo; returns the device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    use_gpu = gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    torch.manual_seed(0)
    return device


class Transformer(nn.Module):
    """A decoder-only transformer that predicts the next token."""

    def __init__(self, vocabulary: int = 256, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [batch, length] -> logits: [batch, length, vocabulary]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """logits: [batch, length - 1, vocabulary], tokens: [batch, length] -> scalar."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
