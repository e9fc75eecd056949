"""State of models and optimizers under every strategy: whole, in the formats of PyTorch."""

import copy
import io

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

import models
import shoal
from loops import alone, assert_close, each_strategy, named, train_alone
from ranks import on_ranks
from test_wrappers import group_over, losses_of


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


def test_PY07_state_dict_is_whole_where_activation_checkpointing_has_wrapped_parts():
    def saves(rank):
        def make():
            torch.manual_seed(0)
            return torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])

        for whole in (False, True):
            net, group = make(), group_over("tcp")  # whose ranks share no memory
            if whole:
                net = checkpoint_wrapper(net)
            else:
                apply_activation_checkpointing(net, check_fn=lambda part: isinstance(part, torch.nn.Linear))
            model = shoal.nn.FullyShardedDataParallel(net, group, auto_wrap_policy=torch.nn.Linear)
            optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.0)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()  # which leaves each rank its own part of the values
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            expected = make().state_dict()
            loaded = torch.load(file)
            assert list(loaded) == list(expected)
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
            make().load_state_dict(loaded)
            model.load_state_dict({name: value + 1 for name, value in loaded.items()})
            assert torch.equal(model.state_dict()["1.bias"], expected["1.bias"] + 1)

        def swap(module, state, prefix, metadata):
            names = f"{prefix}0.weight", f"{prefix}2.weight"
            state.update(zip(names, [state[name] for name in reversed(names)], strict=True))

        net, group = make(), group_over("tcp")
        net._register_state_dict_hook(swap)
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        model = shoal.nn.FullyShardedDataParallel(net, group, auto_wrap_policy=torch.nn.Linear)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    on_ranks(saves)


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


@pytest.mark.parametrize("fused", [False, True])
def test_PY06_state_of_another_shape_is_refused(fused):
    def trains(rank):
        net = torch.nn.Linear(3, 50)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1, fused=fused)
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        before = optimizer.state_dict()
        for shape in ([2, 3], [3, 50], [150], [1], []):
            state = copy.deepcopy(before)
            state["state"][0]["exp_avg"] = torch.ones(shape)
            with pytest.raises(shoal.UsageError) as refused:
                optimizer.load_state_dict(state)
            assert f"has exp_avg of shape {shape} for a parameter of shape [50, 3]" in str(refused.value)
        optimizer.load_state_dict(before)
        optimizer.step()

    on_ranks(trains)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop, torch.optim.NAdam, torch.optim.ASGD])
def test_PY06_state_of_other_shapes_than_the_parameters_is_taken(kind):
    def trains(rank):
        net = torch.nn.Linear(2, 3)
        net.scale = torch.nn.Parameter(torch.tensor(1.0))
        optimizer = shoal.optim.OSS(net.parameters(), kind, lr=0.1)
        for step in range(2):
            (net(torch.ones(2, 2)) * net.scale).pow(2).sum().backward()
            optimizer.step()
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        again = optimizer.state_dict()["state"]
        for index, entry in state["state"].items():
            for key, value in entry.items():
                assert torch.equal(again[index][key], value), (index, key)

    on_ranks(trains)


class Counts(torch.optim.SGD):
    """Keeps numbers of Python."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["tokens"] = entry.get("tokens", 2**24) + 1
                entry["best"], entry["mean"], entry["warm"] = float("inf"), 0.1, True
                assert type(entry["tokens"]) is int, entry
        return super().step(closure)


def test_PY06_numbers_of_a_state_keep_their_kinds():
    def trains(rank):
        def make():
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 1, bias=False)  # which one rank owns
            return net, shoal.optim.OSS(net.parameters(), Counts, lr=0.1, momentum=0.9)

        def step(net, optimizer):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            return optimizer.state_dict()

        state = step(*make())
        entry = {key: value for key, value in state["state"][0].items() if key != "momentum_buffer"}
        assert repr(entry) == "{'best': inf, 'mean': 0.1, 'tokens': 16777217, 'warm': True}", entry
        net, optimizer = make()
        optimizer.load_state_dict(state)
        assert step(net, optimizer)["state"][0]["tokens"] == 2**24 + 2

    on_ranks(trains)


class Migrates(torch.nn.Module):
    """Its weight was kept in another unit before version 2."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.w

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "w"] = state_dict[prefix + "w"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_PY07_versions_of_modules_survive_fsdp_both_ways():
    def run(rank):
        def make():
            return torch.nn.Sequential(torch.nn.Linear(3, 3), Migrates())

        model = shoal.nn.FullyShardedDataParallel(make())
        state = model.state_dict()
        assert state._metadata["1"] == {"version": 2} and set(state._metadata) == {"", "0", "1"}
        plain = make()
        plain.load_state_dict(state)
        assert plain[1].w.tolist() == [1, 1, 1]
        given = plain.state_dict()
        model.load_state_dict(given)
        assert model.state_dict()["1.w"].tolist() == [1, 1, 1]
        old = plain.state_dict()
        old._metadata["1"] = {"version": 1}
        model.load_state_dict(old)
        assert model.state_dict()["1.w"].tolist() == [10, 10, 10]
        root = torch.nn.Sequential(shoal.nn.FullyShardedDataParallel(make()), torch.nn.Linear(3, 1))
        assert set(root.state_dict()._metadata) == {"", "0", "0.0", "0.1", "1"}

    on_ranks(run)


def test_PY06_a_state_that_one_rank_refuses_is_an_error_on_all():
    def run(rank):
        net = torch.nn.Linear(3, 2)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        state = optimizer.state_dict()
        if rank == 1:
            state["param_groups"] = state["param_groups"] * 2
        with pytest.raises(ValueError if rank == 1 else shoal.DisagreeError, match="2 param groups"):
            optimizer.load_state_dict(state)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    on_ranks(run)


def test_PY06_adamw_keeps_its_decoupled_weight_decay_when_it_loads_the_state_of_adam():
    def run(rank):
        def steps(optimizer, net, number):
            for _ in range(number):
                optimizer.zero_grad()
                net(torch.ones(2, 3)).pow(2).sum().backward()
                optimizer.step()

        torch.manual_seed(0)
        alone = torch.nn.Linear(3, 2)
        adam = torch.optim.Adam(alone.parameters(), lr=0.1, weight_decay=0.5)
        steps(adam, alone, 2)
        net = torch.nn.Linear(3, 2)
        net.load_state_dict(alone.state_dict())
        adamw = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5)
        state = copy.deepcopy(adam.state_dict())
        adamw.load_state_dict(adam.state_dict())
        steps(adamw, alone, 2)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
        steps(optimizer, model, 2)
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)

    on_ranks(run)


class SavesHalf(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].half()


class Quantised(torch.Tensor):
    """A kind of tensor that few operators know."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.equal:
            raise NotImplementedError("Quantised: torch.equal")
        return super().__torch_function__(func, types, args, kwargs or {})


# What hooks of state dicts make of a weight.
HOOKS = {
    "computes": lambda weight: weight + 100,
    "copies": lambda weight: weight.clone(),
    "widens": lambda weight: weight.double(),
    "transposes": lambda weight: weight.t(),
    "trims": lambda weight: weight[:2],
    "bits": lambda weight: weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16),
    "lists": lambda weight: weight.clone().tolist(),
    "thins": lambda weight: weight.to_sparse(),
    "quantises": lambda weight: weight.clone().as_subclass(Quantised),
    "moves": lambda weight: weight.to("meta"),
}


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY07_fsdp_leaves_what_modules_put_into_their_state(transport):
    def make():
        torch.manual_seed(0)
        net = torch.nn.Sequential(SavesHalf(4, 4), torch.nn.BatchNorm1d(4), *[torch.nn.Linear(4, 4) for _ in HOOKS])

        def rounds(module, state, prefix, metadata):
            state[prefix + "running_mean"] = state[prefix + "running_mean"].round()

        net[1].register_state_dict_post_hook(rounds)
        for layer, change in zip(net[2:], HOOKS.values(), strict=True):

            def hook(module, state, prefix, metadata, change=change):
                state[prefix + "weight"] = change(state[prefix + "weight"])

            layer.register_state_dict_post_hook(hook)
        return net

    numbers = {f"{number}.weight": name for number, name in enumerate(HOOKS, 2)}

    def check(name, found, value, options):
        kind = numbers.get(name)
        if kind in ("lists", "moves"):
            assert type(found) is type(value) and (kind == "lists" or found.is_meta)
        elif kind == "bits" and options:
            rounded = value.view(torch.float32).bfloat16()
            assert found.dtype == torch.int16 and torch.equal(found.view(torch.bfloat16), rounded)
        elif kind in ("computes", "transposes", "trims", "quantises") and options:  # of bfloat16, as parameters are
            found, value = (one.as_subclass(torch.Tensor).float() for one in (found, value))
            torch.testing.assert_close(found, value, rtol=1e-2, atol=1e-2)
        elif kind == "thins":
            torch.testing.assert_close(found.to_dense().to(value.dtype), value.to_dense(), rtol=1e-2, atol=1e-2)
        elif kind == "quantises":
            assert type(found) is Quantised and (found == value).all()
        else:
            assert found.dtype == value.dtype and torch.equal(found, value), name  # with all bits of the float32 copies

    def saves(rank):
        group = group_over(transport)
        for options in ({}, {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}):
            net = make()
            model = shoal.nn.FullyShardedDataParallel(net, group, auto_wrap_policy=torch.nn.Linear, **options)
            optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.0)
            model(torch.arange(8.0).view(2, 4)).float().sum().backward()
            optimizer.step()  # which leaves each rank its own part of the values
            found, expected = model.state_dict(), make().state_dict()
            torch.save({name: value for name, value in found.items() if type(value) is torch.Tensor}, io.BytesIO())
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1)  # of which the state has nothing
            assert list(found) == list(expected)
            for name, value in expected.items():
                if name == "1.running_mean":
                    assert torch.equal(found[name], found[name].round())
                elif "running" in name or "num_batches" in name:
                    assert found[name].dtype == value.dtype
                else:
                    check(name, found[name], value, options)

    on_ranks(saves)


def test_PY07_keys_that_fsdp_finds_missing_have_their_names_in_the_state():
    def loads(rank):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model = shoal.nn.FullyShardedDataParallel(net)
        for root, prefix in ((model, ""), (torch.nn.ModuleDict({"encoder": model}), "encoder.")):
            state = root.state_dict()
            state[f"{prefix}1.scale"] = state.pop(f"{prefix}1.bias")
            result = root.load_state_dict(state, strict=False)
            assert result.missing_keys == [f"{prefix}1.bias"] and result.unexpected_keys == [f"{prefix}1.scale"], result
            with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{prefix}1.bias"'):
                root.load_state_dict(state)

    on_ranks(loads)
