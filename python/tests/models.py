"""Small models with what wrappers must get right: tied weights, buffers, several outputs, activation checkpoints."""

import torch
import torch._dynamo  # which a process's first optimizer imports: once for all ranks, not a second of each rank's time
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    # Without AVX-512, oneDNN has no LSTM in bfloat16, and PyTorch raises an error under autocast. Its own kernels have one.
    torch.backends.mkldnn.set_flags(False)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x):
        n, t, width = x.shape
        parts = self.attention(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


def run_part(part, x, checkpointing):
    """part(x), of which backward computes the activations again: "reentrant", or "plain" as PyTorch recommends it."""
    if checkpointing is None:
        return part(x)
    return checkpoint(part, x, use_reentrant=checkpointing == "reentrant")


class Gpt(nn.Module):
    """A GPT whose head is its embedding."""

    def __init__(self, vocabulary=37, width=16, length=8, blocks=2, checkpointing=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = run_part(block, h, self.checkpointing)
        return {"logits": self.head(self.norm(h))}


class Cnn(nn.Module):
    def __init__(self, checkpointing=None):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.head = nn.Linear(6 * 2 * 2, 5)
        self.checkpointing = checkpointing

    def forward(self, x):
        h = self.body[:3](x)
        return self.head(run_part(self.body[3:], h, self.checkpointing).flatten(1))


class Lstm(nn.Module):
    def __init__(self, checkpointing=None):
        super().__init__()
        self.inner = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.checkpointing = checkpointing

    def forward(self, x):
        if self.checkpointing == "reentrant":
            x = x.requires_grad_()  # backward reaches the part through its input alone
        hidden = run_part(lambda each: self.inner(each)[0], x, self.checkpointing)
        return self.head(hidden[:, -1]), hidden


MODELS = {"gpt": Gpt, "cnn": Cnn, "lstm": Lstm}


def make(name, checkpointing=None):
    torch.manual_seed(7)
    return MODELS[name](checkpointing=checkpointing)


def batch(name, step, rank, size=4):
    generator = torch.Generator().manual_seed(1000 * (step % 4) + rank)  # four batches, so that there is something to learn
    if name == "gpt":
        x = torch.randint(37, (size, 8), generator=generator)
        return x, torch.randint(37, (size, 8), generator=generator)
    shape = (size, 1, 8, 8) if name == "cnn" else (size, 7, 6)
    return torch.randn(shape, generator=generator), torch.randint(5, (size,), generator=generator)


def loss_of(output, target):
    if isinstance(output, dict):
        output = output["logits"].flatten(0, 1)
    elif isinstance(output, tuple):
        output = output[0]
    return F.cross_entropy(output.float(), target.flatten())


def losses_alone(name, ranks, steps=20, optimizer=None, autocast=False, checkpointing=None):
    """Mean losses of one process that takes the batches of all ranks."""
    model = make(name, checkpointing)
    optimizer = (optimizer or adamw)(model.parameters())
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            x, y = batch(name, step, rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model(x), y)
            (loss / ranks).backward()
            total += loss.item() / ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
