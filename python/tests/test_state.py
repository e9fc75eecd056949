"""State of models and optimizers under every strategy: whole, in the formats of PyTorch."""

import io

import pytest
import torch

import models
import shoal
from loops import alone, assert_close, each_strategy, named, train_alone
from ranks import on_ranks
from test_wrappers import losses_of


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY07_state_dict_is_whole_and_loads(transport):
    def saves(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        losses_of(model, optimizer, "gpt", steps=3)
        _, expected_net = alone()
        state, expected = model.state_dict(), named(strategy, expected_net.state_dict())
        assert list(state) == list(expected)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), name
        inside = model.module if hasattr(model, "module") else model
        for (name, parameter), one in zip(inside.named_parameters(), expected_net.parameters(), strict=True):
            assert (parameter.detach().numpy() == one.detach().numpy()).all(), name
        # Into a wrapper that exists.
        again, second = wrap(models.make("gpt"))
        again.load_state_dict(loaded)
        assert_close(losses_of(again, second, "gpt", steps=3), train_alone(expected_net, models.adamw(expected_net.parameters())))
        with pytest.raises(shoal.UsageError, match="assign=True|was replaced by another object"):
            again.load_state_dict({name: value.clone() for name, value in loaded.items()}, assign=True)
            losses_of(again, second, "gpt", steps=1)

    each_strategy(saves, transport)


def test_PY06_optimizer_state_has_the_format_of_torch_optim_both_ways():
    def exchanges(strategy, wrap):
        if strategy == "ddp":
            return
        model, optimizer = wrap(models.make("gpt"))
        losses_of(model, optimizer, "gpt", steps=3)
        net = models.make("gpt")
        one = models.adamw(net.parameters())
        train_alone(net, one)
        ours, theirs = optimizer.state_dict(), one.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, entry in theirs["state"].items():
            for key, value in entry.items():
                assert torch.equal(ours["state"][index][key], value), (index, key)
        fresh = models.make("gpt")
        fresh.load_state_dict(net.state_dict())
        model, optimizer = wrap(fresh)
        optimizer.load_state_dict(theirs)
        expected = train_alone(net, one, steps=2)
        assert_close(losses_of(model, optimizer, "gpt", steps=2), expected)

    each_strategy(exchanges)


def test_PY06_state_of_another_optimizer_is_refused_and_whole_options_stay_whole():
    def trains(rank):
        net = models.make("gpt")
        adam = torch.optim.AdamW(net.parameters())
        train_alone(net, adam, steps=1)
        sgd = shoal.optim.OSS(models.make("gpt").parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        with pytest.raises(shoal.UsageError, match="has exp_avg, exp_avg_sq, step for .* keeps momentum_buffer"):
            sgd.load_state_dict(adam.state_dict())

        net, alone_net = models.make("gpt"), models.make("gpt")
        for one in (net, alone_net):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_("blocks" in name and parameter.dim() == 2)
        model = shoal.nn.FullyShardedDataParallel(net, shard_by_parameter=True)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.Muon, lr=1e-2)
        alone_optimizer = torch.optim.Muon([one for one in alone_net.parameters() if one.requires_grad], lr=1e-2)
        assert_close(losses_of(model, optimizer, "gpt", steps=3), train_alone(alone_net, alone_optimizer))

    on_ranks(trains)
