"""A LightningModule trained by Lightning's DDP on the backend "shoal".

    torchrun --nproc-per-node 2 with_lightning.py
"""

from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, labels = batch
        output = self.net(x)
        self.log("accuracy", (output.argmax(1) == labels).float().mean(), on_epoch=True, on_step=False, sync_dist=True)
        return F.cross_entropy(output, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(2000, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="shoal"),
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"].item()
        print(f"accuracy {accuracy:.3f} on {trainer.world_size} ranks over {shoal.distributed.group_of().transport}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
