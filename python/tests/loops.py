"""What tests of loops share: all strategies on two ranks, and the same training in one process."""

import torch
import torch.distributed as dist

import models
from ranks import on_ranks
from test_wrappers import STRATEGIES, group_over, mean_loss

SHARDED = {"zero2", "megatron", "fsdp"}  # strategies whose gradients lie on several ranks
PREFIXED = {"ddp", "zero1", "zero2"}  # wrappers whose state_dict has the prefix of PyTorch's DDP


def each_strategy(test, transport="host", timeout=60):
    """Runs test(strategy, wrap) for all strategies on two ranks, all in the same processes."""

    def on_rank(rank):
        group = group_over(transport)
        for strategy, wrap in STRATEGIES.items():
            try:
                test(strategy, lambda net, wrap=wrap: wrap(net, group, None))
            except BaseException as error:
                raise AssertionError(f"{strategy}: {type(error).__name__}: {error}") from error
            dist.barrier()

    on_ranks(on_rank, timeout=timeout)


def train_alone(net, optimizer, steps=3, prepare=None, micros=1, ranks=2, first=0, name="gpt"):
    """One process with the batches of so many ranks."""
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(micros):
            for rank in range(ranks):
                x, y = models.batch(name, micros * step + micro, rank)
                loss = models.loss_of(net(x), y)
                (loss / ranks / micros).backward()
                total += loss.item() / ranks
        if prepare:
            prepare()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def alone(steps=3, ranks=2):
    net = models.make("gpt")
    return train_alone(net, models.adamw(net.parameters()), steps, ranks=ranks), net


def assert_same_parameters(net, expected, message=""):
    """Leaves the bias of attention's keys out: its gradient is nothing but rounding errors, of which AdamW makes steps."""
    for (name, parameter), one in zip(net.named_parameters(), expected, strict=True):
        pair = [parameter.detach(), one.detach()]
        if name.endswith("attention.bias"):
            pair = [torch.cat([queries, values]) for queries, _, values in (whole.chunk(3) for whole in pair)]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5, msg=f"{message} {name}")


def named(strategy, state):
    return {f"module.{name}": value for name, value in state.items()} if strategy in PREFIXED else state


def backward(model, step):
    x, y = models.batch("gpt", step, dist.get_rank())
    loss = models.loss_of(model(x), y)
    loss.backward()
    return mean_loss(loss)


def assert_close(a, b):
    assert max(abs(one - other) for one, other in zip(a, b, strict=True)) < 1e-6, (a, b)
