"""Objects that live as long as somebody needs them, and files of modules that need no shoal."""

import gc
import pickle
import weakref

import pytest
import torch

import models
import shoal
from ranks import on_ranks
from test_local_training import LOCAL, local_updates
from test_wrappers import STRATEGIES


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


def test_FSDP16_an_optimizer_with_a_scaler_that_is_made_again_clips_gradients_without_the_scale():
    def norms(rank):
        def train(make_again):
            torch.manual_seed(0)
            model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(4, 2), param_dtype=torch.float16)

            def make():
                scaler = {"initial_scale": 1024.0}
                return shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1, scaler=scaler)

            optimizer = make_again(make)
            optimizer.scale_loss(model(torch.ones(3, 4)).float().square().sum()).backward()
            return model.clip_grad_norm_(1.0).item()

        def over_the_old_one(make):
            optimizer = make()
            optimizer = make()
            return optimizer

        def beside_one_that_goes(make):
            optimizer = make()
            make()
            return optimizer

        once = train(lambda make: make())
        assert 0 < once < 100
        for make_again in (over_the_old_one, beside_one_that_goes):
            assert train(make_again) == once, make_again.__name__

    on_ranks(norms)


class Rooted(torch.nn.Module):
    """Its child refers to it."""

    def __init__(self):
        super().__init__()
        self.child = torch.nn.Linear(3, 1)
        self.child.__dict__["root"] = self

    def forward(self, x):
        return self.child(x)


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


def test_PY05_a_backward_whose_wrapper_is_gone_is_an_error():
    def refuses(rank):
        for strategy, wrap in {**STRATEGIES, "decentralized": LOCAL["decentralized"]}.items():
            if strategy == "megatron":  # its optimizer sees no forward
                continue
            loss = wrap(torch.nn.Linear(3, 1), None, None)[0](torch.ones(2, 3)).sum()
            gc.collect()
            with pytest.raises(shoal.UsageError, match="wrapper is gone by now.*Keep the wrapper"):
                loss.backward()

    on_ranks(refuses)


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
