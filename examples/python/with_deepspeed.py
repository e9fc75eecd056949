"""DeepSpeed's stages of ZeRO on the backend "shoal", by DeepSpeed's own option for the backend, on CPUs.

    torchrun --nproc-per-node 2 with_deepspeed.py 1 2 3      the stages, one training each
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal


def train(stage: int) -> float:
    torch.manual_seed(0)
    x = torch.randn(2000, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    config = {
        "train_micro_batch_size_per_gpu": 32,  # of every rank, also without GPUs
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},  # ZeRO-3 shards small weights, too
    }
    # An optimizer of torch.optim: DeepSpeed compiles its own for CPUs when a program asks for it.
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2), config=config)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        right = torch.zeros(())
        for points, labels in DataLoader(data, batch_size=32, sampler=sampler):
            output = engine(points)
            engine.backward(F.cross_entropy(output, labels))
            engine.step()
            right += (output.argmax(1) == labels).sum()
        dist.all_reduce(right)
    return float(right) / len(data)


def main() -> None:
    deepspeed.init_distributed(dist_backend="shoal")
    for stage in map(int, sys.argv[1:]):
        accuracy = train(stage)
        if dist.get_rank() == 0:
            ranks, transport = dist.get_world_size(), shoal.distributed.group_of().transport
            print(f"ZeRO-{stage}: accuracy {accuracy:.3f} on {ranks} ranks over {transport}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
