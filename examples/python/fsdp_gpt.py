"""A GPT of one's own on bytes of text under FullyShardedDataParallel: bfloat16 with float32 main copies, checkpoints from
which it goes on, and a sample at the end.

    torchrun --nproc-per-node 2 fsdp_gpt.py TEXT RUN --steps 400      TEXT: a file; RUN: folder of checkpoints
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal

CONTEXT, WIDTH, HEADS = 64, 96, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.norm(x)))


@torch.no_grad()
def sample(model: nn.Module, start: bytes, length: int) -> bytes:
    text = torch.tensor([list(start)])
    for _ in range(length):  # every rank runs the forward: it brings each block's parameters together
        chances = model(text[:, -CONTEXT:])[0, -1].float().softmax(0)
        text = torch.cat([text, torch.multinomial(chances, 1)[None]], 1)
    return bytes(text[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    dist.init_process_group("shoal", init_method="shoal://")  # of any launcher, or alone
    torch.manual_seed(0)
    model = shoal.nn.FullyShardedDataParallel(GPT(), auto_wrap_policy=Block, param_dtype=torch.bfloat16)
    optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=2e-3)
    training = shoal.checkpoint.TrainingState(model, optimizer)
    loaded = shoal.checkpoint.load_latest(options.run, training)
    first = loaded.step if loaded else 0
    data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    for step in range(first, options.steps):
        random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(data) - CONTEXT - 1, (16, 1), generator=random)
        batch = data[starts + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step in (first, options.steps - 1) or step % 100 == 0):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == options.steps:
            shoal.checkpoint.save_async(options.run, training, step=step + 1, keep_last=2)
    training.wait()
    text = sample(model, b"The ", 100)
    if dist.get_rank() == 0:
        print(text.decode(errors="replace"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
