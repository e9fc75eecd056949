"""Arguments of wrappers, optimizers and forward: they work, or one sentence says why not."""

import collections
import dataclasses
import random

import numpy as np
import pytest
import torch

import models
import shoal
from loops import each_strategy
from ranks import on_ranks


def test_PY05_wrong_arguments_are_one_sentence():
    def refuses(rank):
        net = models.make("gpt")
        with pytest.raises(shoal.UsageError, match="has no option find_unused; it has broadcast_buffers, find_unused_parameters"):
            shoal.nn.DistributedDataParallel(net, find_unused=True)
        with pytest.raises(shoal.UsageError, match="bucket_cap_mb is 'big', a str; give a number"):
            shoal.nn.DistributedDataParallel(net, bucket_cap_mb="big")
        with pytest.raises(shoal.UsageError, match="give the class of the optimizer"):
            shoal.optim.OSS(net.parameters(), models.adamw(net.parameters()))
        with pytest.raises(shoal.UsageError, match="LBFGS needs all parameters.*the mean of the loss over ranks"):
            shoal.optim.OSS(net.parameters(), torch.optim.LBFGS)
        with pytest.raises(TypeError, match="momentum"):
            shoal.optim.OSS(net.parameters(), torch.optim.AdamW, momentum=0.9)
        for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag):
            with pytest.raises(shoal.UsageError, match="sparse gradients"):
                shoal.nn.DistributedDataParallel(kind(3, 3, sparse=True))
        graph = torch.nn.Linear(2, 2)
        graph.sparse = True  # of its adjacency, as in programs for graphs
        shoal.nn.DistributedDataParallel(graph)
        model = shoal.nn.DistributedDataParallel(net)
        with pytest.raises(shoal.UsageError, match="give the module in the DistributedDataParallel, model.module"):
            shoal.nn.DistributedDataParallel(model)
        with pytest.raises(shoal.UsageError, match="its first argument is the FullyShardedDataParallel"):
            shoal.optim.FullyShardedOptimizer(net.parameters(), torch.optim.AdamW)

    on_ranks(refuses)


class ClippingSGD(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.05)
        return super().step(closure)


class ClippingAdam(torch.optim.Adam):
    """Adam's first step does not show that it clips."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.05)
        return super().step(closure)


class CentredSGD(torch.optim.SGD):
    """Clips gradients from which it has taken their means, in the groups that say so."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.sub_(one.grad.mean())
            if group.get("clips", True):
                torch.nn.utils.clip_grad_norm_(group["params"], 0.05)
        return super().step(closure)


class DroppingSGD(torch.optim.SGD):
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            if random.random() < 0.5 or np.random.rand() < 0.2:
                one.grad.zero_()
        return super().step(closure)


class FallingSGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"].mul_(0.5)


class NoisySGD(torch.optim.SGD):
    def step(self, closure=None):
        for one in reversed(self.param_groups[0]["params"]):
            one.grad.add_(torch.randn_like(one))
        return super().step(closure)


def test_PY05_optimizers_that_look_at_all_parameters_together_are_refused():
    def refuses(rank):
        net = torch.nn.Linear(3, 2)
        model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(3, 2), shard_by_parameter=True)
        before = torch.get_rng_state()
        for kind in (ClippingSGD, ClippingAdam):
            together = f"{kind.__name__} updates a parameter by what it has of all of them.*clip_grad"
            for make in (
                lambda: shoal.optim.OSS(net.parameters(), kind, lr=0.1),
                lambda: shoal.optim.DistributedOptimizer(net, kind, element_wise=True, lr=0.1),
                lambda: shoal.optim.FullyShardedOptimizer(model, kind, lr=0.1),
                lambda: shoal.nn.DecentralizedDataParallel(net, kind, lr=0.1),
            ):
                with pytest.raises(shoal.UsageError, match=together):
                    make()
        for kind, rate in ((ClippingSGD, 1e-6), (ClippingSGD, 0.0), (ClippingAdam, 1e-5), (CentredSGD, 0.1)):
            with pytest.raises(shoal.UsageError, match=kind.__name__):
                shoal.optim.OSS([torch.nn.Parameter(torch.ones(2, 3, 1, 1))], kind, lr=rate)
        groups = [{"params": [net.bias], "clips": False}, {"params": [net.weight]}]
        with pytest.raises(shoal.UsageError, match="CentredSGD"):
            shoal.optim.OSS(groups, CentredSGD, lr=0.1)
        shoal.optim.OSS(net.parameters(), NoisySGD, lr=0.1)
        drawn = random.getstate(), str(np.random.get_state())
        for _ in range(20):
            shoal.optim.OSS(net.parameters(), DroppingSGD, lr=0.1)
        assert (random.getstate(), str(np.random.get_state())) == drawn
        assert torch.equal(before, torch.get_rng_state())
        rate = torch.tensor(0.1)
        shoal.optim.OSS(net.parameters(), FallingSGD, lr=rate)
        assert rate.item() == pytest.approx(0.1)

    on_ranks(refuses)


def test_PY05_wrap_policies_select_the_same_units():
    def units(rank):
        import functools

        from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policies = [
            models.Block,
            [models.Block],
            ["blocks.0", "blocks.1"],
            lambda module: isinstance(module, models.Block),
            ModuleWrapPolicy({models.Block}),
            CustomPolicy(lambda module: isinstance(module, models.Block)),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={models.Block}),
        ]
        found = [shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=one).units() for one in policies]
        assert all(one == found[0] for one in found) and len(found[0]) == 3
        by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
        assert len(shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=by_size).units()) > 1
        with pytest.raises(shoal.UsageError, match="CustomPolicy gives blocks.0 options of its own, sharding_strategy"):
            own = CustomPolicy(lambda module: {"sharding_strategy": None} if isinstance(module, models.Block) else False)
            shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=own)
        with pytest.raises(shoal.UsageError, match="auto_wrap_policy 3: give a class of modules"):
            shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=3)

    on_ranks(units)


def test_PY02_fsdp_of_a_module_with_an_fsdp_inside_is_refused_and_names_the_policy():
    FSDP = shoal.nn.FullyShardedDataParallel

    def nests(rank):
        inside = "sub-module 0 has a FullyShardedDataParallel of its own: unwrap.* auto_wrap_policy"
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        inner = FSDP(net[0])
        with pytest.raises(shoal.UsageError, match=inside):
            FSDP(net)
        with pytest.raises(shoal.UsageError, match=inside):
            FSDP(torch.nn.Sequential(inner, net[1]))
        inner.unwrap()
        model = FSDP(net, auto_wrap_policy=["0"])
        assert model.units() == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]

    on_ranks(nests)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    parts: list = dataclasses.field(default_factory=list)
    mask: torch.Tensor = dataclasses.field(init=False)  # left unset
    size: int = dataclasses.field(init=False, default=2)


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    loss: torch.Tensor = dataclasses.field(init=False)  # left unset


class OfDataclasses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, batch):
        return Scores(self.linear(batch.x) + self.linear(batch.parts[0].x))


def test_PY05_dataclasses_may_have_fields_that_are_not_set():
    def trains(rank):
        batch = Batch(torch.ones(2, 3), [Batch(torch.ones(2, 3))])
        for wrap in (
            shoal.nn.DistributedDataParallel,
            shoal.nn.FullyShardedDataParallel,
            lambda net: shoal.nn.FullyShardedDataParallel(net, param_dtype=torch.bfloat16),
        ):
            net = OfDataclasses()
            model = wrap(net)
            result = model(batch)
            assert not hasattr(result, "loss")
            result.scores.sum().backward()
        assert result.scores.dtype == torch.bfloat16 and batch.x.dtype == batch.parts[0].x.dtype == torch.float32

    on_ranks(trains)


class Slots:
    __slots__ = ("__result", "next", "unset")

    def __init__(self, result, next=None):
        self.__result, self.next = result, next

    def result(self):
        last = self
        while last.next is not None:
            last = last.next
        return last.__result


class TwoBranches(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second, self.unused = (torch.nn.Linear(3, 1) for _ in range(3))

    def forward(self, x):
        if self.kind is collections.deque:
            return self.first(x), collections.deque([self.second(x)])
        box = Slots([self.second(x)])
        for _ in range(2000):  # more than functions may call each other
            box = Slots(None, box)
        return self.first(x), box


def test_PY05_results_in_deques_and_slots_are_found():
    def trains(rank):
        for kind in (collections.deque, Slots):
            net = TwoBranches(kind)
            model = shoal.nn.DistributedDataParallel(net, find_unused_parameters=True)
            first, box = model(torch.full((2, 3), rank + 1.0))
            second = box[0] if kind is collections.deque else box.result()[0]
            (first + second).sum().backward()
            assert net.second.weight.grad.tolist() == net.first.weight.grad.tolist() == [[3.0, 3.0, 3.0]]

    on_ranks(trains)


def test_PY06_another_default_device_changes_nothing():
    def trains(strategy, wrap):
        trained = []
        for device in (None, "meta"):
            torch.set_default_device(device)
            try:
                torch.manual_seed(1)
                net = torch.nn.Linear(3, 2, device="cpu")
                model, optimizer = wrap(net)
                for _ in range(2):
                    model(torch.ones(4, 3, device="cpu")).square().mean().backward()
                    if strategy == "fsdp":
                        assert model.clip_grad_norm_(0.1).item() > 0.1
                    elif strategy == "zero2":
                        assert optimizer.clip_grad_norm(0.1).item() > 0.1
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.load_state_dict(optimizer.state_dict())
                trained.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
            finally:
                torch.set_default_device(None)
        assert torch.equal(*trained), trained

    each_strategy(trains)
