"""Communication hooks in Python, and averages of models beside them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import models
import shoal
from loops import alone, assert_same_parameters
from ranks import errors_on_ranks, on_ranks
from test_wrappers import group_over, losses_of

HOOKS = {
    "bf16": (shoal.hooks.bf16_compress_hook, 2e-2),
    "fp16": (shoal.hooks.fp16_compress_hook, 2e-2),
    "int8": (lambda: shoal.hooks.int8_quantize_hook(block=64), 5e-2),
    "topk": (lambda: shoal.hooks.topk_hook(fraction=1.0), 1e-6),
    "powersgd": (lambda: shoal.hooks.power_sgd_hook(rank=37, start_iteration=1, min_compression_rate=0.01), 1e-3),
    "late powersgd": (lambda: shoal.hooks.power_sgd_hook(start_iteration=10, carrier="bf16"), 2e-2),
}


@pytest.mark.parametrize(("ranks", "transport"), [(1, "host"), (2, "host"), (2, "gloo"), (3, "host"), (4, "host")])
def test_PY05_hooks_as_objects(ranks, transport):
    expected = alone(ranks=ranks)[0]

    def trains(rank):
        for name, (hook, tolerance) in HOOKS.items():
            net = models.make("gpt")
            model = shoal.nn.DistributedDataParallel(net, group_over(transport), communication_hook=hook())
            losses = losses_of(model, models.adamw(net.parameters()), "gpt", steps=3)
            worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert worst < tolerance, (name, worst)

    on_ranks(trains, ranks)


def test_PY05_hooks_that_differ_or_are_no_hooks_are_refused():
    def differs(rank):
        hook = shoal.hooks.bf16_compress_hook() if rank else shoal.hooks.fp16_compress_hook()
        shoal.nn.DistributedDataParallel(models.make("gpt"), communication_hook=hook)

    assert all("DisagreeError" in error and "rank 1 has communication_hook bf16" in error for error in errors_on_ranks(differs))

    def wrong(rank):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        with pytest.raises(shoal.UsageError, match="is a function: give a hook of shoal.hooks"):
            shoal.nn.DistributedDataParallel(models.make("gpt"), communication_hook=default_hooks.bf16_compress_hook)
        for text in ("BF16", "topk:", "powersgd:a"):
            with pytest.raises(shoal.UsageError, match=f"^communication_hook {text}: "):
                shoal.nn.DistributedDataParallel(models.make("gpt"), communication_hook=text)
        with pytest.raises(shoal.UsageError, match="PowerSGDHook has no option matrix_rank; it has rank, start_iteration"):
            shoal.hooks.power_sgd_hook(matrix_rank=2)

    on_ranks(wrong)


def wrapped_by(strategy, net, hook):
    """The wrapper, with the optimizer that it needs."""
    if strategy == "zero2":
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        return shoal.nn.ShardedDataParallel(net, optimizer, communication_hook=hook, log_sizes=False)
    if strategy == "megatron":
        return shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1, communication_hook=hook)
    kind = shoal.nn.FullyShardedDataParallel if strategy == "fsdp" else shoal.nn.DistributedDataParallel
    return kind(net, communication_hook=hook)


def test_PY05_a_hook_with_memory_serves_one_wrapper_at_a_time():
    """Residuals are stored by parameter name, which the networks of a GAN may share."""

    def runs(rank):
        for strategy in ("ddp", "zero2", "megatron", "fsdp"):
            hook, shared = shoal.hooks.topk_hook(fraction=0.1), shoal.hooks.bf16_compress_hook()
            first = wrapped_by(strategy, torch.nn.Linear(8, 4), hook)
            with pytest.raises(shoal.UsageError, match="hook topk, .* is in use by a .*: make one for each"):
                wrapped_by(strategy, torch.nn.Linear(8, 4), hook)
            if strategy != "megatron":
                schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(first.parameters(), lr=0.1), lambda step: 1.0)
                first.loop = [first, schedule]  # a cycle, which only the collector frees
                del schedule
            del first
            second = wrapped_by(strategy, torch.nn.Linear(8, 4), hook)
            others = [wrapped_by(strategy, torch.nn.Linear(8, 4), shared) for _ in range(2)]
            del second, others
        net, hook = torch.nn.Linear(8, 4), shoal.hooks.power_sgd_hook()
        model = shoal.nn.DistributedDataParallel(net, communication_hook=hook)
        model = shoal.nn.DistributedDataParallel(net, communication_hook=hook)  # while the old one still lives
        with pytest.raises(shoal.UsageError, match="make one for each"):
            carried = shoal.hooks.post_local_sgd_hook(dist.group.WORLD, 0, carrier=hook)
            shoal.nn.DistributedDataParallel(torch.nn.Linear(8, 4), communication_hook=carried)
        del model

    on_ranks(runs)


def test_PY05_an_averager_takes_param_groups_as_pytorchs_does():
    def averages(rank):
        net = torch.nn.Linear(2, 1)
        groups = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}], lr=0.1).param_groups
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(rank)
        averager = shoal.hooks.PeriodicModelAverager(1)
        assert averager.average_parameters(groups)
        assert all(bool((parameter == 0.5).all()) for parameter in net.parameters())
        assert averager.average_parameters(net.parameters())
        with pytest.raises(shoal.UsageError, match="give parameters or param groups, not a Linear"):
            averager.average_parameters(net)

    on_ranks(averages)


def post_local_alone(ranks, start, period, steps):
    """Models of subgroups of two ranks in one process: whole means before step `start`, means of subgroups from then on,
    and every `period` steps the mean of all models."""
    nets = [models.make("gpt") for _ in range(ranks // 2)]
    optimizers = [models.adamw(net.parameters()) for net in nets]
    averaged = []
    for step in range(steps):
        for number, net in enumerate(nets):
            takes = range(ranks) if step < start else (2 * number, 2 * number + 1)
            for rank in takes:
                x, y = models.batch("gpt", step, rank)
                (models.loss_of(net(x), y) / len(takes)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        averaged.append(step >= start and (step - start) % period == 0)
        if averaged[-1]:
            for parameters in zip(*(net.parameters() for net in nets)):
                mean = sum(parameter.detach() for parameter in parameters) / len(nets)
                for parameter in parameters:
                    parameter.data.copy_(mean)
    return nets, averaged


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY05_post_local_sgd(transport):
    """Two subgroups of two ranks, with averages after steps 2 and 5 of seven."""
    start, period, steps = 2, 3, 7
    nets, due = post_local_alone(4, start, period, steps)
    assert due == [False, False, True, False, False, True, False]

    def trains(rank):
        group = group_over(transport)
        inside, _ = shoal.distributed.host_groups(group, size=2)
        net = models.make("gpt")
        hook = shoal.hooks.post_local_sgd_hook(inside, start)
        model = shoal.nn.DistributedDataParallel(net, group, communication_hook=hook)
        optimizer = models.adamw(net.parameters())
        averager = shoal.hooks.PeriodicModelAverager(period, start, group)
        for step in range(steps):
            x, y = models.batch("gpt", step, rank)
            models.loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert averager.average_parameters(net.parameters()) == due[step], step
        assert_same_parameters(net, nets[rank // 2].parameters())
        assert any(not torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))

    on_ranks(trains, 4)


def test_PY05_pytorchs_own_averager_and_hook_run_on_the_backend():
    """PyTorch's DDP with its post_localSGD_hook and its PeriodicModelAverager, over the backend."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    start, period, steps = 2, 3, 7
    nets, _ = post_local_alone(4, start, period, steps)

    def trains(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        net = models.make("gpt")
        model = torch.nn.parallel.DistributedDataParallel(net)
        state = post_local.PostLocalSGDState(dist.group.WORLD, groups[rank // 2], start_localSGD_iter=start)
        model.register_comm_hook(state, post_local.post_localSGD_hook)
        optimizer = models.adamw(net.parameters())
        averager = PeriodicModelAverager(period, warmup_steps=start)
        for step in range(steps):
            x, y = models.batch("gpt", step, rank)
            models.loss_of(model(x), y).backward()
            optimizer.step()
            averager.average_parameters(net.parameters())  # skips parameters without a gradient
            optimizer.zero_grad()
        assert_same_parameters(net, nets[rank // 2].parameters())

    on_ranks(trains, 4)


def test_PY05_post_local_sgd_is_refused_where_one_rank_updates_for_all():
    def trains(rank):
        local_sgd = shoal.hooks.post_local_sgd_hook
        alone = [dist.new_group([one]) for one in range(2)][rank]
        carried = shoal.hooks.power_sgd_hook(carrier=local_sgd(alone, 0))
        together = local_sgd(dist.new_group(), 0)
        for hook in (local_sgd(alone, 0), carried, together):
            net = torch.nn.Linear(3, 1)
            optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
            model = shoal.nn.DistributedDataParallel(net, communication_hook=hook)
            before = net.weight.detach().clone()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            if hook is together:  # one group: every owner has the whole mean
                optimizer.step()
                torch.testing.assert_close(net.weight, before - 0.1 * 1.5)
                continue
            with pytest.raises(shoal.UsageError, match="a post_local_sgd_hook.?, by which groups of ranks train their own"):
                optimizer.step()

    on_ranks(trains)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY01_callbacks_of_futures_wait_for_other_futures(transport):
    def run(rank):
        group = dist.new_group()  # both threads begin collectives, each on a group of its own
        for repetition in range(20):
            first = torch.full((3,), rank + 1.0)

            def again(future, repetition=repetition):
                second = dist.all_reduce(future.value()[0].clone(), group=group, async_op=True).get_future().wait()[0]
                return dist.all_reduce(second + repetition, group=group, async_op=True).get_future().wait()[0]

            future = dist.all_reduce(first, async_op=True).get_future().then(again)
            others = torch.ones(2)
            dist.all_reduce(others)
            assert future.wait().tolist() == [2 * (6 + repetition)] * 3 and others.tolist() == [2, 2]

    on_ranks(run, init={"pg_options": shoal.distributed.Options(transport=transport)})


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY01_pytorchs_powersgd_runs_on_the_backend(transport):
    """Its callbacks wait for collectives of their own. Of full rank it loses nothing."""

    def trained(rank, compresses):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
        )
        if compresses:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).pow(2).sum().backward()
            optimizer.step()
        if compresses:
            assert state.total_numel_before_compression > 0
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def run(rank):
        ours, plain = trained(rank, True), trained(rank, False)
        assert torch.allclose(ours, plain, atol=1e-4), (ours - plain).abs().max()

    on_ranks(run, init={"pg_options": shoal.distributed.Options(transport=transport)})
