"""PY05, PY06: values that programs load or write beside the training step, and what evaluations see of it."""

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import backward, each_strategy
from ranks import on_ranks
from test_wrappers import STRATEGIES, group_over


def equal_on_ranks(tensor):
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    return torch.equal(first, tensor)


# The programs count right answers over all ranks and save rank 0's model, which has to be the one that was counted.
@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_DDP09_an_evaluation_on_all_ranks_is_of_one_model(transport):
    def trains(rank):
        for kind in ("ddp", "zero2"):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
            group = group_over(transport)
            if kind == "ddp":
                model = shoal.nn.DistributedDataParallel(net, group)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            else:
                optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, group, lr=0.1)
                model = shoal.nn.ShardedDataParallel(net, optimizer, group)
            batches = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model(torch.randn(5, 4, generator=batches) + rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                assert equal_on_ranks(model(torch.ones(2, 4))), kind
            assert equal_on_ranks(net[1].running_mean) and equal_on_ranks(net[1].num_batches_tracked)

    on_ranks(trains)


def test_DDP09_an_evaluation_of_one_rank_alone_by_the_wrapper_is_an_error_that_says_how():
    def trains(rank):
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        model = shoal.nn.DistributedDataParallel(net)
        for step in range(3):
            if rank == 0 and step == 1:
                with torch.no_grad():
                    net.eval()(torch.ones(2, 4))
                    net.train()
            if rank == 0 and step == 2:
                with pytest.raises(shoal.DisagreeError, match="on one rank alone, call the module's own forward"):
                    with torch.no_grad():
                        model.eval()(torch.ones(2, 4))
                return
            if step == 2:
                with pytest.raises(shoal.DisagreeError, match="on one rank alone, call the module's own forward"):
                    model(torch.ones(2, 4))
                return
            model(torch.ones(2, 4) + rank).sum().backward()

    on_ranks(trains)


@pytest.mark.parametrize(("averages", "restores"), [("load", "load"), ("load", "copy"), ("copy", "copy")])
def test_PY05_rank_0_alone_evaluates_averages_and_restores_its_own_values(averages, restores):
    def put(net, values, how):
        if how == "load":
            net.load_state_dict(values)
        else:
            torch._foreach_copy_(list(net.state_dict().values()), list(values.values()))

    def trains(rank):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            for _ in range(2):  # as often as the program likes
                if rank == 0 and step != 1:
                    own = copy.deepcopy(net.state_dict())
                    put(net, {name: value / 2 for name, value in own.items()}, averages)
                    put(net, own, restores)
            model(torch.ones(2, 4) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(equal_on_ranks(parameter) for parameter in net.parameters())

    on_ranks(trains)


def test_PY05_a_load_on_all_ranks_is_compared_after_an_evaluation_of_one_rank():
    def trains(rank):
        model = shoal.nn.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            best = copy.deepcopy(model.module.state_dict())
            if rank == 0:
                model.module.load_state_dict({name: value / 2 for name, value in best.items()})
                model.module.load_state_dict(best)
            model.module.load_state_dict(best)
        model(torch.ones(2, 4)).sum().backward()

    on_ranks(trains)


# As the class does that many programs paste: it keeps `param.data` and puts it back.
def test_PY06_states_taken_while_averages_are_in_place_leave_the_models_own_values():
    def trains(rank):
        for transport, kind in itertools.product(("host", "tcp"), ("fsdp", "megatron", "zero1")):
            torch.manual_seed(1)
            group = group_over(transport)
            net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
            model = net
            if kind == "fsdp":
                model = shoal.nn.FullyShardedDataParallel(net, group)
                optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            elif kind == "megatron":
                optimizer = shoal.optim.DistributedOptimizer(net, torch.optim.SGD, group, lr=0.1, momentum=0.9)
            else:
                optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)
                model = shoal.nn.DistributedDataParallel(net, group)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            own = [parameter.detach().clone() for parameter in net.parameters()]
            backup = []
            for parameter in net.parameters():
                backup.append(parameter.data)
                parameter.data = torch.full_like(parameter, 7.0)
            state = model.state_dict()
            assert all((value == 7).all() for value in state.values()), (transport, kind)
            optimizer.state_dict()
            for parameter, data in zip(net.parameters(), backup, strict=True):
                parameter.data = data
            for parameter, before in zip(net.parameters(), own, strict=True):
                assert torch.equal(parameter.detach(), before), (transport, kind)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    on_ranks(trains)


def test_PY05_averages_of_a_model_with_tied_weights_alone_are_swapped_in_and_out():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.there, self.back = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.back.weight = self.there.weight

        def forward(self, x):
            return self.back(self.there(x))

    def trains(rank):
        model = shoal.nn.DistributedDataParallel(Tied())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if rank == 0:
                own = copy.deepcopy(model.module.state_dict())
                model.module.load_state_dict({name: value / 2 for name, value in own.items()})
                model.module.load_state_dict(own)
        model(torch.ones(2, 3)).sum().backward()

    on_ranks(trains)


def test_PY05_values_of_one_rank_may_be_loaded_on_all():
    def trains(rank):
        model = shoal.nn.DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(2):
            model(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                model.module.weight += rank
            values = copy.deepcopy(model.state_dict())
            for value in values.values():
                dist.broadcast(value, 0)
            model.load_state_dict(values)  # rank 0's values stay as they are
        model(torch.ones(2, 4)).sum().backward()
        assert equal_on_ranks(model.module.weight)

    on_ranks(trains)


def test_MEG04_one_rank_alone_may_show_other_values_if_it_puts_its_own_back():
    def trains(rank):
        for strategy in ("zero1", "zero2", "megatron", "fsdp"):
            net = torch.nn.Linear(3, 3)
            model, optimizer = STRATEGIES[strategy](net, dist.new_group([0, 1]), None)
            for back in (True, True, False):
                model(torch.ones(1, 3)).sum().backward()
                if rank == 0:
                    own = net.weight.detach().clone()
                    net.weight.data.copy_(own * 0.9)
                    if back:
                        net.weight.data.copy_(own)
                if back:
                    optimizer.step()
                    optimizer.zero_grad()
            with pytest.raises(shoal.DisagreeError, match="loaded or written; elsewhere not, or as they were"):
                optimizer.step()
            dist.barrier()

    on_ranks(trains)


class Router(torch.nn.Module):
    """Counts this rank's tokens by expert in a buffer, which the program sums over ranks after backward."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(3, 3)
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        self.counts += torch.bincount(chosen, minlength=3)
        return self.gate(x).square().mean()


def test_DDP09_what_forward_counts_in_buffers_is_this_ranks_until_the_next_forward():
    def trains(rank):
        torch.manual_seed(1)
        model = shoal.nn.DistributedDataParallel(Router())
        model(torch.ones(4 + rank, 3)).backward()
        counts = model.module.counts.clone()
        assert counts.sum() == 4 + rank
        dist.all_reduce(counts)
        assert counts.sum() == 9

    on_ranks(trains)


def test_PY06_a_state_without_frozen_parameters_is_loaded():
    def trains(rank):
        def oss(net):
            optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1)
            return shoal.nn.ShardedDataParallel(net, optimizer), optimizer

        def megatron(net):
            parameters = list(net.parameters())
            return net, shoal.optim.DistributedOptimizer(net, torch.optim.AdamW, params=parameters, lr=0.1)

        def fsdp(net):
            model = shoal.nn.FullyShardedDataParallel(net)
            return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, list(net.parameters()), lr=0.1)

        for wrap in (oss, megatron, fsdp):
            net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
            net[0].requires_grad_(False)
            model, optimizer = wrap(net)
            weights = []
            for step in range(4):
                if step == 2:
                    saved = copy.deepcopy(optimizer.state_dict())
                    before = copy.deepcopy(model.state_dict())
                model(torch.full((2, 4), step + rank + 1.0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = copy.deepcopy(model.state_dict())
            model.load_state_dict(before)
            optimizer.load_state_dict(saved)
            assert sorted(saved["state"]) == [2, 3]
            for step in range(2, 4):
                model(torch.full((2, 4), step + rank + 1.0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=0)

    on_ranks(trains)


def test_PY05_new_tensors_are_made_from_parameters():
    def makes(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        parameter = next(iter((model.module if hasattr(model, "module") else model).parameters()))
        for one in (parameter, parameter.detach()):
            made = one.new_tensor([1.0, 2.0])
            assert made.dtype == parameter.dtype and made.tolist() == [1, 2] and not made.requires_grad
            assert one.new(2, 3).shape == (2, 3)
        backward(model, 0)
        optimizer.step()

    each_strategy(makes)


def test_OSS01_steps_without_the_wrapper_are_refused():
    def trains(rank):
        net = torch.nn.Linear(3, 2)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        shoal.nn.ShardedDataParallel(net, optimizer)  # nobody keeps it
        net(torch.ones(2, 3)).sum().backward()
        with pytest.raises(shoal.UsageError, match="ShardedDataParallel that reduced its gradients is gone.*keep the wrapper"):
            optimizer.step()
        optimizer.zero_grad()
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        del model
        optimizer.step()  # with gradients that were reduced
        net(torch.ones(2, 3)).sum().backward()
        with pytest.raises(shoal.UsageError, match="is gone"):
            optimizer.step()
        optimizer.zero_grad()
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del model
        net(torch.ones(2, 3)).sum().backward()
        with pytest.raises(shoal.UsageError, match="is gone"):
            optimizer.step()
        optimizer.zero_grad()
        replicated = shoal.nn.DistributedDataParallel(net)
        for _ in range(2):
            replicated(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(trains)


def test_PY05_hooks_of_loads_go_with_the_next_wrapper():
    def wraps(rank):
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        for wrap in (
            shoal.nn.DistributedDataParallel,
            lambda net: shoal.nn.FullyShardedDataParallel(net, param_dtype=torch.bfloat16),
            lambda net: shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, lr=0.1),
        ):
            inside = copy.deepcopy(net)
            for _ in range(3):
                wrap(inside)
                gc.collect()
            for part in inside.modules():
                assert len(part._load_state_dict_pre_hooks) <= 2 and len(part._load_state_dict_post_hooks) <= 1, wrap
            inside.load_state_dict(net.state_dict())

    on_ranks(wraps)
