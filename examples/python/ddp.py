"""A CNN on Fashion-MNIST with DistributedDataParallel: PyTorch's on the backend "shoal", or shoal's own.

    torchrun --nproc-per-node 2 ddp.py /usr/share/datasets/fashion-mnist --wrapper shoal
    shoal launch -n 2 -- python ddp.py /usr/share/datasets/fashion-mnist

The folder has the files of MNIST or Fashion-MNIST; the one named here is that of the Debian package dataset-fashion-mnist.
"""

import argparse
import gzip
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal


def read(folder: Path, part: str, images: int) -> TensorDataset:
    def content(kind: str, header: int) -> torch.Tensor:
        with gzip.open(folder / f"{part}-{kind}-ubyte.gz") as file:
            return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

    pixels = content("images-idx3", 16).view(-1, 1, 28, 28)[:images].float() / 255
    return TensorDataset(pixels, content("labels-idx1", 8)[:images].long())


def make_model() -> nn.Sequential:
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    return nn.Sequential(convolutions, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def loader(data: TensorDataset, workers: int, train: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=train)
    return DataLoader(data, batch_size=64, sampler=sampler, num_workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrapper", choices=["torch", "shoal"], default="torch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=60000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    dist.init_process_group("shoal", init_method="shoal://")  # of any launcher, or alone
    torch.manual_seed(0)
    wrap = shoal.nn.DistributedDataParallel if options.wrapper == "shoal" else nn.parallel.DistributedDataParallel
    model: nn.Module = wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = loader(read(options.folder, "train", options.images), options.workers, train=True)
    test_data = read(options.folder, "t10k", options.images)
    tests = loader(test_data, options.workers, train=False)
    own = len(range(dist.get_rank(), len(test_data), dist.get_world_size()))  # what follows, the sampler has repeated
    for epoch in range(options.epochs):
        model.train()
        assert isinstance(batches.sampler, DistributedSampler)
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        counts = torch.zeros(2)  # right, all
        with torch.no_grad():
            for images, labels in tests:
                right = (model(images).argmax(1) == labels)[: own - int(counts[1])]
                counts += torch.tensor([right.sum(), len(right)])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            accuracy = f"accuracy {counts[0] / counts[1]:.3f} of {counts[1]:.0f} images"
            print(f"epoch {epoch}: {accuracy} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
