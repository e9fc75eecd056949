"""Small trainings to be saved and loaded."""

import torch

import shoal


def layers(freeze):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net[0].requires_grad_(not freeze)
    return net


def ddp(net):
    return shoal.nn.DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), lr=0.1)


def zero1(net):
    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1)
    return shoal.nn.DistributedDataParallel(net), optimizer


def fsdp(net):
    model = shoal.nn.FullyShardedDataParallel(net)
    return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=0.1)


def train(model, optimizer, rank, steps=3):
    for _ in range(steps):
        model(torch.ones(4, 3) * (rank + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
