"""PyTorch's own schedules on every optimizer: rates and losses are those of one process with the same schedule."""

import functools
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import models
import shoal
from loops import each_strategy
from ranks import on_ranks
from test_wrappers import STRATEGIES, losses_of, mean_loss

STEPS = 8
SCHEDULES = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, STEPS),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 1e-2, total_steps=STEPS + 1),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=4),
}


def advance(schedule, loss):
    if isinstance(schedule, schedules.ReduceLROnPlateau):
        schedule.step(loss)
    else:
        schedule.step()


def two_groups(net):
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]


def alone(make):
    net = models.make("lstm")
    optimizer = torch.optim.AdamW(two_groups(net), lr=3e-3)
    schedule = make(optimizer)
    losses, rates = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(2):
            x, y = models.batch("lstm", step, rank)
            loss = models.loss_of(net(x), y) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        advance(schedule, total)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(total)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return losses, rates, schedule.state_dict()


def wrapped(strategy, net):
    if strategy == "megatron":
        return net, shoal.optim.DistributedOptimizer(net, torch.optim.AdamW, params=two_groups(net), lr=3e-3)
    if strategy == "fsdp":
        model = shoal.nn.FullyShardedDataParallel(net)
        return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, two_groups(net), lr=3e-3)
    optimizer = shoal.optim.OSS(two_groups(net), torch.optim.AdamW, lr=3e-3)
    if strategy == "zero2":
        return shoal.nn.ShardedDataParallel(net, optimizer), optimizer
    return shoal.nn.DistributedDataParallel(net), optimizer


def test_PY06_every_schedule_of_pytorch():
    expected = {name: alone(make) for name, make in SCHEDULES.items()}

    def trains(rank):
        strategies = sorted(STRATEGIES.keys() - {"ddp"})  # in turns: a schedule sees the groups that all of them have
        for number, (name, make) in enumerate(SCHEDULES.items()):
            strategy = strategies[number % len(strategies)]
            model, optimizer = wrapped(strategy, models.make("lstm"))
            schedule = make(optimizer)
            losses, rates, state = expected[name]
            for step in range(STEPS):
                x, y = models.batch("lstm", step, rank)
                loss = models.loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                loss = mean_loss(loss)
                advance(schedule, loss)
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                assert abs(loss - losses[step]) < 1e-6, (strategy, name, step)
                assert [group["lr"] for group in optimizer.param_groups] == rates[step], (strategy, name, step)
            again = make(optimizer)
            again.load_state_dict(schedule.state_dict())
            assert schedule.state_dict().keys() == state.keys() == again.state_dict().keys()

    on_ranks(trains, timeout=200)


def test_PY06_a_schedule_goes_on_with_a_loaded_optimizer():
    losses, rates, _ = alone(SCHEDULES["OneCycleLR"])

    def trains(rank):
        for strategy in STRATEGIES.keys() - {"ddp"}:
            model, optimizer = wrapped(strategy, models.make("lstm"))
            schedule = SCHEDULES["OneCycleLR"](optimizer)
            for step in range(STEPS):
                if step == 4:
                    states = model.state_dict(), optimizer.state_dict(), schedule.state_dict()
                    inside = {name.removeprefix("module."): value.clone() for name, value in states[0].items()}
                    net = models.make("lstm")
                    net.load_state_dict(inside)
                    del model, optimizer, schedule
                    model, optimizer = wrapped(strategy, net)
                    schedule = SCHEDULES["OneCycleLR"](optimizer)
                    optimizer.load_state_dict(states[1])
                    schedule.load_state_dict(states[2])
                x, y = models.batch("lstm", step, rank)
                loss = models.loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                assert abs(mean_loss(loss) - losses[step]) < 1e-6, (strategy, step)
                assert [group["lr"] for group in optimizer.param_groups] == rates[step], (strategy, step)

    on_ranks(trains, timeout=100)


def test_PY06_hooks_of_all_optimizers_are_called_once_per_step():
    class Own(torch.optim.SGD):  # whose step is tried when it is wrapped
        pass

    def trains(rank):
        called = []
        hooks = [
            register_optimizer_step_pre_hook(lambda *_: called.append("before")),
            register_optimizer_step_post_hook(lambda *_: called.append("after")),
        ]
        made = {name: functools.partial(wrap, group=None, kind=None) for name, wrap in STRATEGIES.items()}
        made["own"] = lambda net: (net, shoal.optim.DistributedOptimizer(net, Own, lr=0.1))

        def local_updates(net):
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            inner.register_step_post_hook(lambda *_: called.append("own"))
            torch.optim.lr_scheduler.StepLR(inner, 5)
            return net, shoal.optim.LocalUpdates(net, inner, every=2)

        made["local_updates"] = local_updates
        for name, make in made.items():
            model, optimizer = make(models.make("lstm"))
            losses_of(model, optimizer, "lstm", steps=2)
            expected = ["before", *(["own"] if name == "local_updates" else []), "after"] * 2
            assert called == expected, (name, called)
            called.clear()
        x, y = models.batch("lstm", 0, rank)
        for steps in (False, True):  # of Rates, which does nothing
            model = shoal.nn.DecentralizedDataParallel(models.make("lstm"), torch.optim.SGD, topology="ring", lr=0.1)
            model.optimizer.register_step_post_hook(lambda *_: called.append("own"))
            for _ in range(2):
                models.loss_of(model(x), y).backward()
                if steps:
                    model.optimizer.step()
            assert called == ["before", "after", *(["own"] if steps else [])] * 2, (steps, called)
            called.clear()
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
        for hook in hooks:
            hook.remove()
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
        assert called == ["before", "after"]

    on_ranks(trains)


def test_PY06_a_step_around_that_of_pytorch_is_the_users_inside_of_others():
    called = []

    def decorated(step):
        @functools.wraps(step)  # which copies the mark of PyTorch's own wrapper, too
        def run(self, closure=None):
            called.append(type(self))
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.01, 0.01)
            return step(self, closure)

        return run

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # its class has PyTorch's wrapper from now on

    class Clamped(torch.optim.SGD):
        step = decorated(torch.optim.SGD.step)

    def replaced(net):
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        inner.step = types.MethodType(decorated(type(inner).step), inner)
        torch.optim.lr_scheduler.StepLR(inner, 5)
        return inner

    def trains(rank):
        seen = []
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))

        def oss(net):
            optimizer = shoal.optim.OSS(net.parameters(), Clamped, lr=0.1)
            return shoal.nn.ShardedDataParallel(net, optimizer), optimizer

        def fsdp(net):
            model = shoal.nn.FullyShardedDataParallel(net, shard_by_parameter=True)
            return model, shoal.optim.FullyShardedOptimizer(model, Clamped, lr=0.1)

        made = {
            "oss": oss,
            "megatron": lambda net: (net, shoal.optim.DistributedOptimizer(net, Clamped, lr=0.1)),
            "fsdp": fsdp,
            "local": lambda net: (net, shoal.optim.LocalUpdates(net, Clamped(net.parameters(), lr=0.1), every=2)),
            "schedule": lambda net: (net, shoal.optim.LocalUpdates(net, replaced(net), every=2)),
        }
        for name, make in made.items():
            torch.manual_seed(0)
            net = torch.nn.Linear(4, 3)
            before = [parameter.detach().clone() for parameter in net.parameters()]
            model, optimizer = make(net)
            called.clear()
            seen.clear()
            model(torch.ones(2, 4)).mul(100).sum().backward()
            optimizer.step()
            assert called and seen == [optimizer], (name, called, seen)
            after = list(model.state_dict().values()) if name == "fsdp" else list(net.parameters())
            for old, new in zip(before, after, strict=True):
                torch.testing.assert_close(new.detach(), old - 0.001)
        hook.remove()

    on_ranks(trains)


def test_PY06_lbfgs_under_data_parallelism():
    """Every rank evaluates the closure equally often, because losses are means over ranks."""

    def trains(rank):
        net, one = (torch.nn.Linear(6, 3).double() for _ in range(2))
        one.load_state_dict(net.state_dict())
        for parameter, other in zip(net.parameters(), one.parameters(), strict=True):
            dist.broadcast(parameter.detach(), 0)
            other.data.copy_(parameter.data)
        x = [torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5)
        alone = torch.optim.LBFGS(one.parameters(), lr=0.5, max_iter=5)

        def closure():
            optimizer.zero_grad()
            loss = (model(x[rank]) - 1).pow(2).mean()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total / 2

        def closure_alone():
            alone.zero_grad()
            loss = sum((one(part) - 1).pow(2).mean() for part in x) / 2
            loss.backward()
            return loss

        for _ in range(3):
            assert abs(optimizer.step(closure).item() - alone.step(closure_alone).item()) < 1e-9

    on_ranks(trains)


def test_PY06_gradients_that_are_zeroed_in_place_count_as_zero():
    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        losses_of(model, optimizer, "gpt", steps=1)
        optimizer.zero_grad(set_to_none=False)
        x, y = models.batch("gpt", 1, dist.get_rank())
        models.loss_of(model(x), y).backward()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()  # weight decay and momentum move parameters whose gradient is zero
        assert all(not torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()  # those without a gradient stay
        assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))

    each_strategy(trains)


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_PY06_averaged_models_of_pytorch(kind):
    def trains(strategy, wrap):
        net, one = models.make("lstm"), models.make("lstm")
        model, optimizer = wrap(net)
        inside = model.module if hasattr(model, "module") else model
        options = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
        averages = [torch.optim.swa_utils.AveragedModel(models.make("lstm"), **options) for _ in range(2)]
        alone = models.adamw(one.parameters())
        for step in range(3):
            x, y = models.batch("lstm", step, dist.get_rank())
            models.loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(2):
                x, y = models.batch("lstm", step, rank)
                (models.loss_of(one(x), y) / 2).backward()
            alone.step()
            alone.zero_grad()
            averages[0].update_parameters(inside)
            averages[1].update_parameters(one)
        for a, b in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

    each_strategy(trains)


def test_PY06_a_schedule_of_decentralised_rates_steps_without_an_optimizers_step():
    def trains(rank):
        model = shoal.nn.DecentralizedDataParallel(torch.nn.Linear(2, 1), torch.optim.SGD, topology="ring", lr=0.4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()  # steps
                schedule.step()
        assert model.optimizer.param_groups[0]["lr"] == 0.1

    on_ranks(trains)
