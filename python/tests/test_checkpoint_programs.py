"""PY07: checkpoints of what programs do: branches, frozen layers, workers, hosts."""

import pytest
import torch
import torch.distributed as dist

import shoal
from checkpoint_training import ddp, fsdp, layers, train, zero1
from ranks import on_ranks


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
