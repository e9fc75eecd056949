"""PY07: values and names that are unlike others come back as they were."""

import os

import pytest
import torch

import shoal
from checkpoint_training import ddp, fsdp, train
from ranks import on_ranks
from test_local_training import LOCAL
from test_wrappers import STRATEGIES


@pytest.mark.parametrize("position", [b"\x80\x04\xff", "epoch 3"])
def test_PY07_a_position_may_be_bytes(position, tmp_path):
    def trains(rank):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        training = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path, training, step=1, position=position if rank else "place")
        found = shoal.checkpoint.load(tmp_path, training).position
        assert found == (position if rank else "place"), found

    on_ranks(trains)


class Rotary(torch.nn.Module):
    def __init__(self, fill=1.0):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.full((3,), fill), persistent=False)
        self.register_buffer("count", torch.full((1,), fill))


def test_PY07_buffers_that_are_no_part_of_the_state(tmp_path):
    def trains(rank):
        file = tmp_path / f"{rank}.pt"
        shoal.checkpoint.save_module(file, Rotary())
        Rotary().load_state_dict(torch.load(file))
        torch.save(Rotary().state_dict(), file)
        other = Rotary(2.0)
        shoal.checkpoint.load_module(file, other)
        assert other.inv_freq[0] == 2 and other.count == 1
        for make in (ddp, fsdp):
            model, optimizer = make(Rotary())
            shoal.checkpoint.save(tmp_path / make.__name__, shoal.checkpoint.TrainingState(model, optimizer), step=1)
            other = Rotary(2.0)
            model, optimizer = make(other)
            loaded = shoal.checkpoint.load(
                tmp_path / make.__name__, shoal.checkpoint.TrainingState(model, optimizer)
            )
            assert loaded.exact and other.count == 1 and other.inv_freq[0] == 2, loaded
        Rotary().load_state_dict(model.full_state_dict())  # FSDP's

    on_ranks(trains)


@pytest.mark.parametrize("extension", [".pt", ".safetensors"])
def test_PY07_lazy_conjugates_are_saved_as_what_they_are(extension, tmp_path):
    class Waves(torch.nn.Module):
        def __init__(self, waves):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("waves", waves)

    def trains(rank):
        torch.manual_seed(0)
        z = torch.randn(5, dtype=torch.complex64)
        file = tmp_path / f"{rank}{extension}"
        shoal.checkpoint.save_module(file, Waves(z.conj()))
        other = Waves(torch.zeros(5, dtype=torch.complex64))
        shoal.checkpoint.load_module(file, other)
        assert torch.equal(other.waves, z.conj().resolve_conj())
        lazy = Waves(torch.zeros(5, dtype=torch.complex64).conj())
        shoal.checkpoint.load_module(file, lazy)
        assert torch.equal(lazy.waves.resolve_conj(), z.conj().resolve_conj())
        for how in (shoal.checkpoint.save, shoal.checkpoint.save_async):
            module = Waves(z.conj())
            training = shoal.checkpoint.TrainingState(module, torch.optim.SGD(module.parameters(), lr=0.1))
            run = tmp_path / how.__name__
            how(run, training, step=1)
            training.wait()
            shoal.checkpoint.load_module(run, other)
            assert torch.equal(other.waves, z.conj().resolve_conj()), how

    on_ranks(trains, ranks=1)


def test_PY07_an_infinite_option_and_numbers_of_the_state_come_back(tmp_path):
    def trains(rank):
        torch.set_default_dtype(torch.float64)

        def make():
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 3)
            optimizer = torch.optim.NAdam([{"params": list(net.parameters()), "max_norm": float("inf")}], lr=0.1)
            return net, optimizer, shoal.checkpoint.TrainingState(net, optimizer)

        net, optimizer, state = make()
        train(net, optimizer, 0, steps=7)
        shoal.checkpoint.save(tmp_path, state, step=1)
        train(net, optimizer, 0, steps=7)
        other, optimizer, state = make()
        loaded = shoal.checkpoint.load(tmp_path, state)
        assert loaded.exact and optimizer.param_groups[0]["max_norm"] == float("inf"), loaded
        train(other, optimizer, 0, steps=7)
        assert torch.equal(net.weight, other.weight)

    on_ranks(trains, ranks=1)


def test_PY07_ranks_but_one_may_have_no_position(tmp_path):
    def trains(rank):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        state = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state, step=1, position="here" if rank == 0 else None)
        assert shoal.checkpoint.load(tmp_path / "run", state).position == ("here" if rank == 0 else "")
        with pytest.raises(shoal.UsageError, match="position must be text or bytes, not int"):
            shoal.checkpoint.save(tmp_path / "run", state, step=2, position=3)

    on_ranks(trains)


class WithRanks(torch.nn.Module):
    """Its names are those that a checkpoint gives to what belongs to one rank."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.ranks = torch.nn.ModuleList([torch.nn.LayerNorm(4) for _ in range(2)])
        with torch.no_grad():
            for number, norm in enumerate(self.ranks):
                norm.weight.fill_(2 + number)

    def forward(self, x):
        return self.ranks[1](self.ranks[0](x * self.weight))


def test_PY07_a_child_named_ranks_is_the_models(tmp_path):
    def run(rank):
        net = WithRanks()
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state)
        with torch.no_grad():
            net.weight.zero_()
        return shoal.checkpoint.load(tmp_path / "run", state).exact, net.weight.tolist()

    assert on_ranks(run) == [(True, [1, 1, 1, 1])] * 2


class Observed(torch.nn.Module):
    """Its weight is quantized by channel: buffers of the observer have no element, or one, before the first forward."""

    def __init__(self, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width)
        self.fake = torch.ao.quantization.default_per_channel_weight_fake_quant()

    def forward(self, x):
        return self.norm(torch.nn.functional.linear(x, self.fake(self.linear.weight), self.linear.bias))


def training_of(model, optimizer):
    alone = isinstance(optimizer, (shoal.optim.DistributedOptimizer, shoal.optim.LocalUpdates))
    return shoal.checkpoint.TrainingState(
        *((optimizer,) if alone else (model,) if isinstance(model, shoal.nn.DecentralizedDataParallel) else (model, optimizer))
    )


def test_PY07_buffers_get_the_shapes_that_a_load_of_the_module_would_give_them(tmp_path):
    def trains(rank):
        for strategy, wrap in (STRATEGIES | LOCAL).items():
            net, run = Observed(), tmp_path / strategy
            model, optimizer = wrap(net, None, None)
            state = training_of(model, optimizer)
            shoal.checkpoint.save(run, state, step=0)
            train(model, optimizer, rank)
            assert net.fake.scale.shape == net.fake.activation_post_process.max_val.shape == (3,), strategy
            shoal.checkpoint.save(run, state, step=3)
            other = Observed()
            loaded = shoal.checkpoint.load(run, training_of(*wrap(other, None, None)))
            assert loaded.exact and loaded.differences == [], (strategy, loaded)
            for (name, buffer), own in zip(other.named_buffers(), net.buffers(), strict=True):
                assert torch.equal(buffer, own), (strategy, name)
            shoal.checkpoint.load(run / "step-0", state)
            assert net.fake.scale.shape == (1,) and net.fake.activation_post_process.max_val.shape == (0,)
            alone = Observed()
            shoal.checkpoint.load_module(run, alone)
            assert torch.equal(alone.fake.scale, other.fake.scale)
            wider = Observed(width=4)
            state = training_of(*wrap(wider, None, None))
            with pytest.raises(shoal.UsageError, match=r"norm.running_mean is \[3\], wanted is \[4\]") as refused:
                shoal.checkpoint.load(run, state)
            assert "max_val" not in str(refused.value)
            with pytest.raises(shoal.UsageError, match="linear.weight"):
                shoal.checkpoint.load_module(run, wider)
            assert wider.fake.scale.tolist() == [1.0] and wider.fake.activation_post_process.max_val.shape == (0,)
            assert wider.norm.running_mean.shape == (4,)

    on_ranks(trains)


class Counting(torch.optim.Optimizer):
    """Keeps numbers of Python."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["on"] = True
                state["seed"] = torch.tensor(7)
                state["warm"] = torch.tensor(True)
                state["half"] = torch.tensor(1.5, dtype=torch.float16)
                state["rate"] = group["lr"] / state["step"]
                parameter.add_(parameter.grad, alpha=-state["rate"])


@pytest.mark.parametrize("strategy", ["none", "ddp", "local"])
def test_PY07_numbers_of_an_optimizers_state_stay_what_they_are(strategy, tmp_path):
    def resumes(rank):
        def make(seed=2**60 + 1):
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 3)
            optimizer = Counting([{"params": list(net.parameters()), "seed": seed, "tensor": torch.tensor(seed)}], 0.1)
            if strategy == "local":
                updates = shoal.optim.LocalUpdates(net, optimizer, every=2)
                return net, optimizer, updates, shoal.checkpoint.TrainingState(updates)
            model = shoal.nn.DistributedDataParallel(net) if strategy == "ddp" else net
            return model, optimizer, optimizer, shoal.checkpoint.TrainingState(model, optimizer)

        def step(model, optimizer):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        model, inner, optimizer, training = make()
        step(model, optimizer)
        shoal.checkpoint.save(tmp_path / "run", training, step=1)
        before = [dict(inner.state[parameter]) for parameter in inner.param_groups[0]["params"]]
        model, inner, optimizer, training = make(seed=3)
        assert shoal.checkpoint.load(tmp_path / "run", training).exact
        assert inner.param_groups[0]["seed"] == inner.param_groups[0]["tensor"].item() == 2**60 + 1
        after = [dict(inner.state[parameter]) for parameter in inner.param_groups[0]["params"]]
        assert after == before
        kinds = {key: value.dtype if isinstance(value, torch.Tensor) else type(value) for key, value in after[0].items()}
        tensors = {"seed": torch.int64, "warm": torch.bool, "half": torch.float16}
        assert kinds == {"step": int, "on": bool, "rate": float, **tensors}
        step(model, optimizer)
        assert [inner.state[parameter]["step"] for parameter in inner.param_groups[0]["params"]] == [2, 2]
        for wide in (2**53 + 1, torch.tensor(2**53 + 1)):
            inner.state[inner.param_groups[0]["params"][1]]["seed"] = wide
            with pytest.raises(shoal.UsageError, match="seed of the optimizer .* is 9007199254740993, .* keep it in a tensor"):
                shoal.checkpoint.save(tmp_path / "run", training, step=2)

    on_ranks(resumes)


def test_PY07_a_path_need_not_be_utf8(tmp_path):
    missing = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")
    with pytest.raises(shoal.CheckpointError, match=r"/\\xff\.pt: "):
        shoal.checkpoint.load_module(missing, torch.nn.Linear(2, 2))
