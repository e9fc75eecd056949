"""A training loop with Hugging Face Accelerate on the backend "shoal": make the process group first, and Accelerate uses it.

    torchrun --nproc-per-node 2 with_accelerate.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def main() -> None:
    dist.init_process_group("shoal")  # Accelerate's own option takes "gloo" alone where there is no GPU
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(2000, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(data, batch_size=32, shuffle=True)
    )
    for epoch in range(5):
        right = 0
        for points, labels in loader:
            with accelerator.accumulate(model):
                output = model(points)
                accelerator.backward(F.cross_entropy(output, labels))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            right += int(accelerator.gather_for_metrics(output.argmax(1) == labels).sum())
        accelerator.print(f"epoch {epoch}: accuracy {right / len(data):.3f} on {accelerator.num_processes} ranks")
    accelerator.print(f"over {shoal.distributed.group_of().transport}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
