"""PY07: checkpoints of what programs do: frozen layers, branches, buffers of all kinds, workers, other optimizers."""

import struct
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks, on_ranks


class Branches(torch.nn.Module):
    """Each rank trains one of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x, rank):
        return (self.a if rank == 0 else self.b)(x)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ["local", "decentralised"])
def test_PY07_each_rank_goes_on_with_its_own_optimizer_state(strategy, optimizer, tmp_path):
    def inner(parameters):
        if optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.1)

    def trains(rank):
        def make():
            net = Branches()
            if strategy == "local":
                updates = shoal.optim.LocalUpdates(net, inner(net.parameters()), every=50)
                return net, net, updates, shoal.checkpoint.TrainingState(updates)
            model = shoal.nn.DecentralizedDataParallel(net, inner)
            return net, model, None, shoal.checkpoint.TrainingState(model)

        def steps(model, updates, count):
            for _ in range(count):
                model(torch.ones(4, 3), rank).sum().backward()
                if updates is not None:
                    updates.step()
                    updates.zero_grad()

        net, model, updates, state = make()
        steps(model, updates, 3)
        shoal.checkpoint.save(tmp_path / "run", state, step=3)
        steps(model, updates, 3)
        other, model, updates, state = make()
        loaded = shoal.checkpoint.load(tmp_path / "run", state)
        assert loaded.exact and loaded.differences == [], loaded
        steps(model, updates, 3)
        dist.barrier()
        for parameter, expected in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(parameter, expected)

    on_ranks(trains)


def test_PY07_fewer_ranks_take_the_state_of_a_rank_that_has_it(tmp_path):
    def step(net, updates, rank):
        net(torch.ones(4, 3), rank).sum().backward()
        updates.step()
        updates.zero_grad()

    def make():
        net = Branches()
        inner = torch.optim.AdamW(net.parameters(), lr=0.1)
        updates = shoal.optim.LocalUpdates(net, inner, every=50)
        return net, inner, updates, shoal.checkpoint.TrainingState(updates)

    def saves(rank):
        net, inner, updates, state = make()
        for _ in range(3):
            step(net, updates, rank)
        shoal.checkpoint.save(tmp_path / "run", state, step=3)

    def loads(rank):
        net, inner, updates, state = make()
        assert not shoal.checkpoint.load(tmp_path / "run", state).exact
        assert set(inner.state[net.a.weight]) == set(inner.state[net.b.weight]) == {"step", "exp_avg", "exp_avg_sq"}
        step(net, updates, 0)
        step(net, updates, 1)

    on_ranks(saves)
    on_ranks(loads, ranks=1)


def layers(freeze):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net[0].requires_grad_(not freeze)
    return net


def ddp(net):
    return shoal.nn.DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), lr=0.1)


def zero1(net):
    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1)
    return shoal.nn.DistributedDataParallel(net), optimizer


def fsdp(net):
    model = shoal.nn.FullyShardedDataParallel(net)
    return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=0.1)


def train(model, optimizer, rank, steps=3):
    for _ in range(steps):
        model(torch.ones(4, 3) * (rank + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_PY07_a_training_with_frozen_layers_goes_on_under_any_strategy(tmp_path):
    def trains(rank):
        strategies = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp}
        for writer, write in strategies.items():
            model, optimizer = write(layers(freeze=True))
            train(model, optimizer, rank)
            shoal.checkpoint.save(tmp_path / writer, shoal.checkpoint.TrainingState(model, optimizer), step=3)
            train(model, optimizer, rank)
            expected = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
            for reader in strategies.values():
                model, optimizer = reader(layers(freeze=True))
                loaded = shoal.checkpoint.load(tmp_path / writer, shoal.checkpoint.TrainingState(model, optimizer))
                assert loaded.differences == [], loaded
                train(model, optimizer, rank)
                for name, value in model.state_dict().items():
                    torch.testing.assert_close(value, expected[name.removeprefix("module.")])

    on_ranks(trains)


def test_PY07_layers_are_frozen_after_a_resume(tmp_path):
    def trains(rank):
        model, optimizer = ddp(layers(freeze=False))
        train(model, optimizer, rank)
        shoal.checkpoint.save(tmp_path / "run", shoal.checkpoint.TrainingState(model, optimizer), step=3)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        model, optimizer = ddp(layers(freeze=True))
        shoal.checkpoint.load(tmp_path / "run", shoal.checkpoint.TrainingState(model, optimizer))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
        train(model, optimizer, rank)
        now = [parameter.detach() for parameter in model.parameters()]
        assert torch.equal(now[0], expected[0]) and not torch.equal(now[2], expected[2])
        model, optimizer = zero1(layers(freeze=True))  # which keeps the state of what is frozen
        assert shoal.checkpoint.load(tmp_path / "run", shoal.checkpoint.TrainingState(model, optimizer)).differences == []
        train(model, optimizer, rank)
        zero = [parameter.detach() for parameter in model.parameters()]
        torch.testing.assert_close(zero, now)
        with pytest.raises(shoal.UsageError, match="not trained here: 0.bias, 0.weight"):
            shoal.checkpoint.load(tmp_path / "run", shoal.checkpoint.TrainingState(*fsdp(layers(freeze=True))))

    on_ranks(trains)


def test_PY07_workers_that_start_during_a_save_do_not_keep_its_lock(tmp_path):
    def trains(rank):
        net = torch.nn.Linear(4000, 4000)
        training = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save_async(tmp_path, training, step=1)
        data = torch.utils.data.TensorDataset(torch.ones(8, 1))
        loader = torch.utils.data.DataLoader(
            data, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
        batches = iter(loader)
        next(batches)
        training.wait()
        shoal.checkpoint.save(tmp_path, training, step=2)
        shoal.checkpoint.save(tmp_path, training, step=3)

    on_ranks(trains, ranks=1)


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


@pytest.mark.parametrize(("before", "after"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("Adam", "AdamW")])
def test_PY07_the_state_of_another_optimizer_is_refused(before, after, tmp_path):
    def trains(rank):
        def make(kind):
            net = layers(freeze=False)
            more = {"momentum": 0.9} if kind == "SGD" else {}
            return shoal.nn.DistributedDataParallel(net), getattr(torch.optim, kind)(net.parameters(), lr=0.1, **more)

        model, optimizer = make(before)
        train(model, optimizer, rank)
        shoal.checkpoint.save(tmp_path, shoal.checkpoint.TrainingState(model, optimizer), step=3)
        model, optimizer = make(after)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        state = shoal.checkpoint.TrainingState(model, optimizer)
        if before == "Adam":
            shoal.checkpoint.load(tmp_path, state)
        else:
            with pytest.raises(shoal.UsageError, match=f"options of .*{before}|{before}Options"):
                shoal.checkpoint.load(tmp_path, state)
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
            assert not optimizer.state
        train(model, optimizer, rank)

    on_ranks(trains)


# The fused ones of torch.optim would write past its end.
@pytest.mark.parametrize("wrap", ["model", "local_updates"])
def test_PY07_a_state_of_another_shape_is_refused(wrap, tmp_path):
    def trains(rank):
        def make():
            net = torch.nn.Linear(16, 16)
            optimizer = torch.optim.Adam(net.parameters(), fused=True)
            if wrap == "local_updates":
                return net, optimizer, shoal.checkpoint.TrainingState(shoal.optim.LocalUpdates(net, optimizer))
            model = shoal.nn.DistributedDataParallel(net)
            return net, optimizer, shoal.checkpoint.TrainingState(model, optimizer)

        net, optimizer, state = make()
        net(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        shoal.checkpoint.save(tmp_path / "good", state)
        optimizer.state[net.weight]["exp_avg"] = torch.zeros(2)
        shoal.checkpoint.save(tmp_path / "bad", state)
        net, optimizer, state = make()
        shoal.checkpoint.load(tmp_path / "good", state)
        with pytest.raises(shoal.UsageError, match=r"exp_avg of shape \[2\] for a parameter of shape \[16, 16\]"):
            shoal.checkpoint.load(tmp_path / "bad", state)

    on_ranks(trains)


def test_PY07_a_parameter_that_is_not_the_modules_is_named():
    def trains(rank):
        net = torch.nn.Linear(2, 2)
        temperature = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([*net.parameters(), temperature], lr=0.1)
        training = shoal.checkpoint.TrainingState(shoal.nn.DistributedDataParallel(net), optimizer)
        with pytest.raises(shoal.UsageError, match=r"a parameter \[3\] of param group 0 is not one of the module's"):
            shoal.checkpoint.save("nowhere", training, step=1)

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


def test_PY07_a_small_file_does_not_take_much_memory(tmp_path):
    """It makes one tensor of 64 sizes, and recalls it again and again."""
    key = b"k" * 256
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x000"
    pickle += b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX" + struct.pack("<I", 256) + key
    pickle += b"X\x03\x00\x00\x00cpuK\x00tQq\x010"
    pickle += b"(h\x01K\x00(" + b"K\x00" * 64 + b"tq\x02h\x02\x89Ntq\x030"
    pickle += b"]q\x04(" + b"h\x00h\x03R" * 100_000 + b"e."
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/version", b"3\n")

    def loads(rank):
        with pytest.raises(shoal.CheckpointError, match="stands for more than 64 MiB"):
            shoal.checkpoint.load_module(tmp_path / "small.pt", torch.nn.Linear(2, 2))

    for ended in Ranks(loads, ranks=1).outcomes(timeout=60):
        assert ended[0], ended


@pytest.mark.parametrize("given", [True, False])
def test_PY07_hosts_that_average_their_parameters_go_on_after_a_resume(given, tmp_path):
    def trains(rank):
        def make():
            torch.manual_seed(0)
            inside, across = shoal.distributed.host_groups(size=2)
            model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(3, 2), inside)
            optimizer = shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, lr=0.1)
            everybody = {"process_group": dist.group.WORLD} if given else {}
            return model, optimizer, shoal.checkpoint.TrainingState(model, optimizer, **everybody)

        def steps(model, optimizer, count):
            for number in range(count):
                model(torch.full((4, 3), 1.0 + rank + number)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        def values(model, optimizer):
            with model.summon_full_params():
                return [parameter.detach().clone() for parameter in model.module.parameters()]

        model, optimizer, state = make()
        steps(model, optimizer, 3)
        shoal.checkpoint.save(tmp_path / "run", state, step=3)
        steps(model, optimizer, 3)
        expected = values(model, optimizer)
        model, optimizer, state = make()
        loaded = shoal.checkpoint.load(tmp_path / "run", state)
        assert loaded.exact and "hybrid_gossip" in loaded.strategy, loaded
        steps(model, optimizer, 3)
        for value, other in zip(values(model, optimizer), expected, strict=True):
            assert torch.equal(value, other)

    on_ranks(trains, ranks=4)


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


def test_PY07_ranks_that_load_with_other_options_are_told(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state)
        with pytest.raises(shoal.DisagreeError, match="rates"):
            shoal.checkpoint.load(tmp_path / "run", state, rates=rank == 0)

    on_ranks(run)


def test_PY07_a_background_save_that_failed_is_told_at_the_end(tmp_path):
    program = (
        "import torch, shoal\n"
        "torch.distributed.init_process_group('shoal', init_method='shoal://')\n"
        "net = torch.nn.Linear(2, 1)\n"
        "state = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "shoal.checkpoint.save_async('/proc/nope/run', state)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "background save has failed, and nobody called wait()" in ended.stderr


def test_PY07_values_that_differ_after_a_load_are_named(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state)
        shoal.checkpoint.load(tmp_path / "run", state)
        model(torch.ones(1, 2)).sum().backward()
        shoal.checkpoint.load(tmp_path / "run", state)
        with torch.no_grad():
            net.weight.add_(rank)
        with pytest.raises(shoal.DisagreeError, match="weight"):
            model(torch.ones(1, 2))

    on_ranks(run)


def test_PY07_a_position_that_is_too_long_on_one_rank_is_told_to_all(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(shoal.UsageError, match="position has 3000000 bytes, 2097152 at most"):
            shoal.checkpoint.save(tmp_path / "run", state, position="x" * (3_000_000 if rank == 1 else 1))

    on_ranks(run)
