"""torchrec: one embedding table per rank, accessed by all_to_all, and a dense part with data parallelism."""

import torch
import torch.distributed as dist
from common import STEPS, show, tell
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES, ROWS, BATCH = ["user", "item"], 32, 4


class Ranking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", embedding_dim=8, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, keyed: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.embeddings(keyed).values()).mean()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    world, cpu = dist.group.WORLD, torch.device("cpu")
    by_table = {f"t_{f}": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for f in FEATURES}
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), constraints=by_table)
    net = Ranking()
    apply_optimizer_in_backward(torch.optim.Adagrad, net.embeddings.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(net, device=cpu, plan=planner.collective_plan(net, pg=world))
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda some: torch.optim.Adagrad(some, 0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        lengths = torch.randint(1, 4, (len(FEATURES) * BATCH,), generator=source)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=source)
        optimizer.zero_grad()
        loss = model(KeyedJaggedTensor(FEATURES, values, lengths=lengths))
        loss.backward()
        optimizer.step()
        show(loss.detach())
    tell(STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
