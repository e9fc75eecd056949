"""What tests of loops share: all strategies on two ranks, and the same training in one process."""

import torch.distributed as dist

import models
from ranks import on_ranks
from test_wrappers import STRATEGIES, group_over, mean_loss

SHARDED = {"zero2", "megatron", "fsdp"}  # strategies whose gradients lie on several ranks
PREFIXED = {"ddp", "zero1", "zero2"}  # wrappers whose state_dict has the prefix of PyTorch's DDP


def each_strategy(test, transport="host"):
    """Runs test(strategy, wrap) for all strategies on two ranks, all in the same processes."""

    def on_rank(rank):
        group = group_over(transport)
        for strategy, wrap in STRATEGIES.items():
            try:
                test(strategy, lambda net, wrap=wrap: wrap(net, group, None))
            except BaseException as error:
                raise AssertionError(f"{strategy}: {type(error).__name__}: {error}") from error
            dist.barrier()

    on_ranks(on_rank)


def train_alone(net, optimizer, steps=3, prepare=None, micros=1):
    """One process with the batches of two ranks."""
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(micros):
            for rank in range(2):
                x, y = models.batch("gpt", micros * step + micro, rank)
                loss = models.loss_of(net(x), y)
                (loss / 2 / micros).backward()
                total += loss.item() / 2
        if prepare:
            prepare()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def alone(steps=3):
    net = models.make("gpt")
    return train_alone(net, models.adamw(net.parameters()), steps), net


def named(strategy, state):
    return {f"module.{name}": value for name, value in state.items()} if strategy in PREFIXED else state


def backward(model, step):
    x, y = models.batch("gpt", step, dist.get_rank())
    loss = models.loss_of(model(x), y)
    loss.backward()
    return mean_loss(loss)


def assert_close(a, b):
    assert max(abs(one - other) for one, other in zip(a, b, strict=True)) < 1e-6, (a, b)
