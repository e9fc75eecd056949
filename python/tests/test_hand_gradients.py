"""Gradients that a program sets by hand, without a backward through the wrapper."""

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, train_alone
from ranks import errors_on_ranks, on_ranks
from test_wrappers import STRATEGIES, mean_loss


@pytest.mark.parametrize("strategy", ["ddp", "megatron", "fsdp"])
def test_PY05_gradients_that_are_set_by_hand(strategy):
    """The same on every rank: they are the gradients. Others are named."""

    def by_hand(model, optimizer, step, same):
        inside = model.module if hasattr(model, "module") else model
        x, y = models.batch("gpt", step, dist.get_rank())
        parameters = list(inside.parameters())
        gradients = torch.autograd.grad(models.loss_of(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if same:
                dist.all_reduce(gradient)
                gradient = gradient / 2
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    def trains(rank):
        one = models.make("gpt")
        alone = models.adamw(one.parameters())
        expected = train_alone(one, alone, steps=3)
        model, optimizer = STRATEGIES[strategy](models.make("gpt"), None, None)
        by_hand(model, optimizer, 0, same=True)
        by_hand(model, optimizer, 1, same=True)
        x, y = models.batch("gpt", 2, rank)
        assert_close([mean_loss(models.loss_of(model(x), y))], expected[2:])
        by_hand(model, optimizer, 2, same=False)
        by_hand(model, optimizer, 3, same=False)

    for error in errors_on_ranks(trains):
        assert "DisagreeError" in error and "set by hand" in error and "tokens.weight with digest" in error, error


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_PY05_gradients_that_are_set_by_hand_are_compared_where_the_model_is_compiled(backend):
    def trains(rank):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        model = torch.compile(shoal.nn.DistributedDataParallel(net), backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.full((4, 3), 1.0 + rank)).square().sum()
            for parameter, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    for error in errors_on_ranks(trains):
        assert "DisagreeError" in error and "set by hand" in error, error


def test_PY05_a_compiled_model_is_not_compiled_again_in_each_step():
    def trains(rank):
        net = torch.nn.Linear(3, 2)
        model = torch.compile(shoal.nn.DistributedDataParallel(net), backend="eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(6):
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(trains)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "megatron", "fsdp"])
def test_PY05_gradients_that_are_set_by_hand_are_dropped_by_the_optimizer(strategy):
    def trains(rank):
        net = models.make("gpt")
        model, optimizer = STRATEGIES[strategy](net, None, None)
        parameters = list(net.parameters())
        x, y = models.batch("gpt", 0, 0)
        gradients = torch.autograd.grad(models.loss_of(model(x), y), parameters)
        for set_to_none in (False, True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.flatten()[:].view_as(gradient)  # a view, as of one flat tensor for all
            parameters[0].grad = torch.autograd.grad(parameters[0].square().sum(), parameters[0], create_graph=True)[0]
            optimizer.zero_grad(set_to_none)
            assert all(one.grad is None if set_to_none else not one.grad.any() for one in parameters)
            assert set_to_none or not parameters[0].grad.requires_grad

    on_ranks(trains)
