"""Serve a small language model whose layers are split over all ranks. Plain PyTorch, without any commwatch code.

torchrun --nproc-per-node 2 examples/serve_tp.py --requests 10
curl --data 'How are' http://127.0.0.1:8000

Rank 0 answers requests over HTTP. While there is none, the other ranks wait in a broadcast for the next one. A client in the same
process sends requests at irregular times, so that the example needs no other program.
"""

import argparse
import queue
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, NEW_BYTES = 192, 4, 24
#: A prompt, and where its answer goes.
Asked = tuple[bytes, "queue.Queue[bytes]"]


class Model(nn.Module):
    """Predicts the next byte from the mean of all before it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        for layer in self.layers:
            parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: [length] -> logits of the next byte: [256]."""
        hidden = self.embed(text).mean(0, keepdim=True)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: torch.Tensor = self.head(hidden)[0]
        return logits


def listen(port: int, asked: "queue.Queue[Asked]") -> int:
    """Answer requests over HTTP in threads; returns the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer: queue.Queue[bytes] = queue.Queue()
            asked.put((self.rfile.read(int(self.headers["Content-Length"])), answer))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.get())

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def ask(port: int, longest_s: float) -> None:
    """Send requests at irregular times."""
    while True:
        time.sleep(longest_s * torch.rand(()).item())
        urllib.request.urlopen(f"http://127.0.0.1:{port}", data=b"How are ").read()


def main() -> None:
    """Serve a number of requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--longest", type=float, default=5.0, help="seconds between two requests, at most")
    arguments = parser.parse_args()
    device, asked = start(), queue.Queue[Asked]()
    model = Model(init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))).to(device)
    if dist.get_rank() == 0:
        port = listen(arguments.port, asked)
        threading.Thread(target=ask, args=(port, arguments.longest), daemon=True).start()
    for _ in range(arguments.requests):
        prompt, answer = asked.get() if dist.get_rank() == 0 else (b"", queue.Queue())
        given = [prompt]
        dist.broadcast_object_list(given, src=0)
        text = torch.tensor(list(given[0]), device=device)
        with torch.no_grad():
            for _ in range(NEW_BYTES):
                text = torch.cat((text, model(text).argmax(keepdim=True)))
        answer.put(bytes(text.tolist()))
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
