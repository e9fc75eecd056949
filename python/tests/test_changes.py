"""Arguments of wrappers, and what may change after wrapping: it works, or one sentence says why not."""

import collections
import copy
import dataclasses
import gc
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, backward, each_strategy, train_alone
from ranks import on_ranks
from test_local_training import decentralized, local_updates, shard_gossip
from test_wrappers import STRATEGIES, group_over, losses_of, mean_loss


def test_PY05_changes_of_the_module_and_copies_are_refused():
    def refuses(strategy, wrap):
        net = models.make("gpt")
        net.register_buffer("seen", torch.zeros(1))
        model, optimizer = wrap(net)
        losses_of(model, optimizer, "gpt", steps=1)
        for copies in (copy.deepcopy, pickle.dumps):
            for object in (model, optimizer):
                if isinstance(object, shoal.optim.ShardedOptimizer) or object is model is not net:
                    with pytest.raises(TypeError, match="cannot be (pickled|copied)"):
                        copies(object)
        net.extra = torch.nn.Linear(2, 2)
        with pytest.raises(shoal.UsageError, match="the module extra was added; construct the wrapper after"):
            losses_of(model, optimizer, "gpt", steps=1)
        del net.extra
        net.register_buffer("extra", torch.ones(1))
        with pytest.raises(shoal.UsageError, match="the buffer extra was added; register it in __init__, or in forward with pers"):
            losses_of(model, optimizer, "gpt", steps=1)
        del net.extra
        net.seen = None
        with pytest.raises(shoal.UsageError, match="the buffer seen was set to None; construct the wrapper after"):
            losses_of(model, optimizer, "gpt", steps=1)
        net.seen = torch.zeros(1)
        net.norm.weight = torch.nn.Parameter(torch.ones(16))
        with pytest.raises(shoal.UsageError, match="the parameter norm.weight was replaced by another object.*model.module"):
            losses_of(model, optimizer, "gpt", steps=1)
        net.norm = None  # nothing keeps the child; without a wrapper (Megatron) its forward is the first to see it
        with pytest.raises((shoal.UsageError, TypeError), match="the module norm was set to None; construct the wrapper|not callable"):
            losses_of(model, optimizer, "gpt", steps=1)

    each_strategy(refuses)


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


def test_PY05_a_module_that_is_saved_as_a_whole_needs_no_shoal_where_it_is_read():
    def pickles(rank):
        for strategy, wrap in {**STRATEGIES, "local": lambda net, *_: local_updates(net, None)}.items():
            net = models.make("lstm")
            for _ in range(2):
                kept = wrap(net, None, None)
                data = pickle.dumps(net)
                assert b"shoal" not in data, strategy
                hooks = len(net._load_state_dict_pre_hooks)
                del kept
                gc.collect()
                net = pickle.loads(data)
                net.load_state_dict(models.make("lstm").state_dict())
                assert len(net._load_state_dict_pre_hooks) <= hooks <= 2, (strategy, hooks)

    on_ranks(pickles)


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


class Doubled(torch.nn.Module):
    def forward(self, value):
        return value * 2

    def right_inverse(self, value):
        return value / 2


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_FSDP07_a_module_whose_parametrizations_were_removed_is_unwrapped(transport):
    from torch.nn.utils import parametrizations, parametrize

    def make():
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        parametrizations.weight_norm(net[0])
        parametrizations.orthogonal(net[1])
        return net

    def remove(net):
        for layer in (net[0], net[1]):
            parametrize.remove_parametrizations(layer, "weight")
        return net

    def ends(rank):
        net = make()
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), auto_wrap_policy=torch.nn.Linear)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.0)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = make()(x)
        remove(net)
        assert model.unwrap() is net
        del model, optimizer
        gc.collect()
        torch.testing.assert_close(net(x), expected)
        assert list(net.state_dict()) == list(remove(make()).state_dict())
        net(x).sum().backward()
        assert net[0].weight.grad is not None
        # With param_dtype the new values are of rounded ones.
        for normed in (True, False):
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            if normed:
                parametrizations.weight_norm(net[0])
            else:
                parametrize.register_parametrization(net[0], "weight", Doubled())
            model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
            parametrize.remove_parametrizations(net[0], "weight")
            with pytest.raises(shoal.UsageError, match="in torch.bfloat16, .*: call unwrap[(][)] first"):
                model.unwrap()

    on_ranks(ends)


def test_PY05_frozen_parameters_and_other_dtypes():
    def trains(strategy, wrap):
        nets = [models.make("gpt"), models.make("gpt")]
        for net in nets:
            net.blocks[0].requires_grad_(False)
        model, optimizer = wrap(nets[0])
        assert_close(losses_of(model, optimizer, "gpt", steps=3), train_alone(nets[1], models.adamw(nets[1].parameters())))

        net = models.make("cnn")
        model, optimizer = wrap(net)
        model.double()

        def steps():
            for step in range(2):
                x, y = models.batch("cnn", step, dist.get_rank())
                models.loss_of(model(x.double()), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        if strategy in {"megatron", "fsdp"}:
            with pytest.raises(shoal.UsageError, match="Revert the change .module.to.dtype.., or wrap the module again"):
                steps()
            return
        steps()
        for name, tensor in net.state_dict().items():  # buffers differ: each rank's last batch has changed them
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, tensor) or "running" in name, name
        before = net.body[1].running_mean.clone()
        model(models.batch("cnn", 5, 0)[0].double())
        dist.broadcast(before, 0)
        after = net.body[1].running_mean.clone()
        dist.broadcast(after, 0)
        assert after.dtype == torch.float64 and torch.equal(after, net.body[1].running_mean)

    each_strategy(trains)


# Small buckets stay where they were made; of large ones only the owner's does, and the others are made anew in each step.
@pytest.mark.parametrize(("channels", "transport"), [(4, "host"), (4, "tcp"), (96, "host")])
def test_PY05_parameters_may_get_other_strides_after_wrapping(channels, transport):
    def make():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 16 * channels, 2), torch.nn.Tanh(), torch.nn.Conv2d(16 * channels, channels, 2), torch.nn.Flatten()
        )

    def batch(step, rank):
        return torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank))

    def alone():
        net = make()
        optimizer = models.adamw(net.parameters())
        losses = []
        for step in range(4):
            each = [net(batch(step, rank)).square().mean() for rank in range(2)]
            losses.append(sum(one.item() for one in each) / 2)
            (sum(each) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    expected = alone()

    def trains(strategy, wrap):
        for when in range(3):
            model, optimizer = wrap(make())
            losses = []
            for step in range(4):
                if step == when:
                    model.to(memory_format=torch.channels_last)
                loss = model(batch(step, dist.get_rank())).square().mean()
                losses.append(mean_loss(loss))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=when == 0)  # gradients of zeros are converted, too
            worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
            assert worst < 1e-5, (when, losses, expected)

    each_strategy(trains, transport)


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
            result = wrap(net)(batch)
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


class Rooted(torch.nn.Module):
    """Its child refers to it."""

    def __init__(self):
        super().__init__()
        self.child = torch.nn.Linear(3, 1)
        self.child.__dict__["root"] = self

    def forward(self, x):
        return self.child(x)


LOCAL = {wrap.__name__: lambda net, group, kind, wrap=wrap: wrap(net, group) for wrap in (local_updates, decentralized, shard_gossip)}


def by_itself(net, model, optimizer):
    return None  # its child refers to it


def by_a_hook(net, model, optimizer):
    net.child.register_forward_hook(lambda *_: (model, optimizer) and None)


def by_an_attribute(net, model, optimizer):
    net.child.__dict__["owners"] = (model, optimizer)


def by_a_hook_of_the_optimizer(net, model, optimizer):
    getattr(optimizer, "inner", optimizer).register_step_post_hook(lambda *_: (model, optimizer) and None)


def by_a_checkpoint(net, model, optimizer):
    alone = isinstance(optimizer, (shoal.optim.DistributedOptimizer, shoal.optim.LocalUpdates))
    parts = (optimizer,) if alone else (model,) if isinstance(model, shoal.nn.DecentralizedDataParallel) else (model, optimizer)
    net.child.__dict__["state"] = shoal.checkpoint.TrainingState(*parts)
    by_a_hook_of_the_optimizer(net, model, optimizer)


def test_PY05_a_training_that_only_refers_to_itself_is_freed_whoever_leads_to_the_wrapper():
    def frees(strategy, wrap):
        for lead in (by_itself, by_a_hook, by_an_attribute, by_a_hook_of_the_optimizer, by_a_checkpoint):
            net = Rooted()
            model, optimizer = wrap(net)
            lead(net, model, optimizer)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            kept = [weakref.ref(one) for one in (net, model, optimizer)]
            del net, model, optimizer
            gc.collect()
            assert [one() for one in kept] == [None] * 3, (strategy, lead.__name__)

    def on_rank(rank):
        for strategy, wrap in (STRATEGIES | LOCAL).items():
            frees(strategy, lambda net, wrap=wrap: wrap(net, None, None))

    on_ranks(on_rank)


class Owner:
    """A trainer whose method makes the optimizer."""

    def __init__(self, strategy):
        self.rate = 1e-3
        self.net = net = Rooted()
        if strategy in ("zero1", "zero2"):
            wrapper = shoal.nn.DistributedDataParallel if strategy == "zero1" else shoal.nn.ShardedDataParallel
            self.optimizer = shoal.optim.OSS(net.parameters(), self.adam)
            self.model = wrapper(net) if strategy == "zero1" else wrapper(net, self.optimizer)
        elif strategy == "megatron":
            self.model, self.optimizer = net, shoal.optim.DistributedOptimizer(net, self.adam, element_wise=True)
        elif strategy == "fsdp":
            self.model = shoal.nn.FullyShardedDataParallel(net)
            self.optimizer = shoal.optim.FullyShardedOptimizer(self.model, self.adam, element_wise=True)
        else:
            self.model = shoal.nn.DecentralizedDataParallel(net, self.adam, topology="ring")
            self.optimizer = self.model.optimizer

    def adam(self, groups):
        return torch.optim.Adam(groups, lr=self.rate)


def test_PY05_the_owner_of_an_optimizers_factory_is_freed():
    def on_rank(rank):
        for strategy in ("zero1", "zero2", "megatron", "fsdp", "decentralized"):
            owner = Owner(strategy)
            for _ in range(2):
                owner.model(torch.ones(2, 3)).sum().backward()
                owner.optimizer.step()
                owner.optimizer.zero_grad()
            kept = [weakref.ref(owner), weakref.ref(owner.net)]
            del owner
            gc.collect()
            assert [one() for one in kept] == [None] * 2, strategy

    on_ranks(on_rank)


def mapped_again(tensor):
    """The tensor as a process has it to which it was sent."""
    memory = torch.UntypedStorage._new_shared_fd_cpu(*tensor.untyped_storage()._share_fd_cpu_())
    return torch.empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_FSDP05_after_an_evaluation_with_averages_the_float32_copies_have_all_their_bits(transport):
    def evaluates(rank):
        net = models.make("gpt")
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=1e-3)
        parameters = dict(net.named_parameters())

        def copies(values):
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

        def replaces(values):
            for name, parameter in parameters.items():
                parameter.data = values[name]

        for swap in (copies, replaces):
            losses_of(model, optimizer, "gpt", steps=1)
            before = model.state_dict()
            with torch.no_grad():
                own = {name: parameter.clone() if swap is copies else parameter.data for name, parameter in parameters.items()}
                averages = {name: 1.1 * before[name] for name in own}
                swap(averages)
                model(models.batch("gpt", 0, rank)[0])
                with model.summon_full_params(writeback=False):
                    for name, parameter in parameters.items():
                        assert torch.equal(parameter, averages[name].to(torch.bfloat16)), name
                swap(own)
            for _ in range(2):
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name]), name
                with model.summon_full_params(writeback=False):
                    pass  # takes over what was put back

    on_ranks(evaluates)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY05_parameters_that_other_processes_get_are_trained_all_the_same(transport):
    def trains(rank):
        group = group_over(transport)
        for strategy, wrap in (STRATEGIES | LOCAL).items():
            in_pages = transport == "tcp" and strategy == "fsdp"
            losses = []
            for shares in (False, True):
                net = models.make("gpt")
                model, optimizer = wrap(net, group, None)
                losses.append(losses_of(model, optimizer, "gpt", steps=2))
                if shares and not in_pages:
                    net.share_memory()
                elif shares:
                    with model.summon_full_params(writeback=False):
                        net.share_memory()
                        sent = mapped_again(net.norm.weight)
                        assert torch.equal(sent, net.norm.weight)
                seen = None if in_pages or not shares else [mapped_again(one) for one in net.parameters()]
                losses[-1] += losses_of(model, optimizer, "gpt", steps=2)
                with torch.no_grad():
                    net.norm.weight.mul_(0.5)  # counts once
                losses[-1] += losses_of(model, optimizer, "gpt", steps=2)
                if seen:
                    for now, one in zip(seen, net.parameters(), strict=True):
                        assert one.is_shared() and torch.equal(now, one), strategy
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0, msg=f"{strategy} {losses}")

    on_ranks(trains)


def test_PY05_a_backward_through_a_graph_from_before_the_step_is_an_error_on_all_ranks():
    def stale(rank):
        for transport in ("host", "tcp"):
            group = group_over(transport)
            for strategy, wrap in (STRATEGIES | LOCAL).items():
                torch.manual_seed(1)
                nets = torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
                (generator, of_generator), (judge, of_judge) = (wrap(net, group, None) for net in nets)
                noise = torch.randn(2, 3)

                def judges(fake):
                    loss = judge(fake).sigmoid().log().mean()
                    loss.backward(retain_graph=True)
                    of_judge.step()
                    of_judge.zero_grad()
                    return loss

                for _ in range(2):  # as it should be
                    judges(generator(noise).detach())
                    (-judge(generator(noise)).sigmoid().log().mean()).backward()
                    of_generator.step()
                    for optimizer in (of_generator, of_judge):
                        optimizer.zero_grad()
                loss = judges(generator(noise).detach())
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                dist.barrier()

    on_ranks(stale)
