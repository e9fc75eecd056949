"""A CNN on Fashion-MNIST whose ranks may be killed, and replaced, while it trains.

    shoal launch -n 2 --elastic 1:2 --max-restarts 3 -- python elastic.py /usr/share/datasets/fashion-mnist
    kill -9 PID  # of a rank

The folder is as in ddp.py. --die kills a rank by itself, in the middle of epoch 1.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp import make_model, read
from torch.utils.data import DataLoader

import shoal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60000)
    parser.add_argument("--die", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("shoal")
    torch.manual_seed(0)
    net = make_model()
    model = shoal.nn.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    train, test = read(options.folder, "train", options.images), read(options.folder, "t10k", options.images)
    sampler = shoal.data.DistributedSampler(train)
    elastic = shoal.Elastic(model, optimizer, sampler, state={"schedule": schedule})
    dies = options.die and not elastic.joining and dist.get_rank() == 1

    def accuracy() -> float:
        net.eval()
        images, labels = test[dist.get_rank() :: dist.get_world_size()]
        with torch.no_grad():
            counts = torch.tensor([(net(images).argmax(1) == labels).sum(), len(labels)])
        net.train()
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    for epoch in range(elastic.first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        while elastic.in_epoch():  # again with each change of the ranks
            for number, (images, labels) in enumerate(DataLoader(train, batch_size=64, sampler=sampler)):
                if dies and (epoch, number) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)

                def compute(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
                    F.cross_entropy(model(images), labels).backward()

                if not elastic.step(len(images), compute, optimizer.step):
                    break
                optimizer.zero_grad()
                schedule.step()
        right = elastic.together(accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {right:.3f} on {dist.get_world_size()} rank(s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
