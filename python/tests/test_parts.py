"""Communication hooks, Join, SyncBatchNorm and ShardGossipOptimizer in Python."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms

import models
import shoal
from loops import alone, assert_close
from ranks import errors_on_ranks, on_ranks
from test_wrappers import RATES, STRATEGIES, group_over, losses_of, mean_loss

HOOKS = {
    "bf16": (shoal.hooks.bf16_compress_hook, 2e-2),
    "fp16": (shoal.hooks.fp16_compress_hook, 2e-2),
    "int8": (lambda: shoal.hooks.int8_quantize_hook(block=64), 5e-2),
    "topk": (lambda: shoal.hooks.topk_hook(fraction=1.0), 1e-6),
    "powersgd": (lambda: shoal.hooks.power_sgd_hook(rank=37, start_iteration=1, min_compression_rate=0.01), 1e-3),
    "late powersgd": (lambda: shoal.hooks.power_sgd_hook(start_iteration=10, carrier="bf16"), 2e-2),
}


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY05_hooks_as_objects(transport):
    expected = alone()[0]

    def trains(rank):
        for name, (hook, tolerance) in HOOKS.items():
            net = models.make("gpt")
            model = shoal.nn.DistributedDataParallel(net, group_over(transport), communication_hook=hook())
            losses = losses_of(model, models.adamw(net.parameters()), "gpt", steps=3)
            worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert worst < tolerance, (name, worst)

    on_ranks(trains)


def test_PY05_hooks_that_differ_or_are_no_hooks_are_refused():
    def differs(rank):
        hook = shoal.hooks.bf16_compress_hook() if rank else shoal.hooks.fp16_compress_hook()
        shoal.nn.DistributedDataParallel(models.make("gpt"), communication_hook=hook)

    assert all("DisagreeError" in error and "communication hook" in error for error in errors_on_ranks(differs))

    def wrong(rank):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        with pytest.raises(shoal.UsageError, match="is a function: give a hook of shoal.hooks"):
            shoal.nn.DistributedDataParallel(models.make("gpt"), communication_hook=default_hooks.bf16_compress_hook)
        with pytest.raises(shoal.UsageError, match="PowerSGDHook has no option matrix_rank; it has rank, start_iteration"):
            shoal.hooks.power_sgd_hook(matrix_rank=2)

    on_ranks(wrong)


def joined_alone(divide_by_all, ranks=2):
    """One process that takes what ranks 0 and 1 have: 4 and 2 batches."""
    net = models.make("gpt")
    optimizer = models.adamw(net.parameters())
    for step in range(4):
        takes = [rank for rank in range(ranks) if step < 4 - 2 * rank]
        for rank in takes:
            x, y = models.batch("gpt", step, rank)
            (models.loss_of(net(x), y) / (ranks if divide_by_all else len(takes))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY05_join_with_different_numbers_of_batches(transport):
    expected = {divide: [p.detach() for p in joined_alone(divide).parameters()] for divide in (True, False)}

    def trains(rank):
        for strategy, wrap in STRATEGIES.items():
            for divide in (True, False):
                net = models.make("gpt")
                model, optimizer = wrap(net, group_over(transport), None)
                joined = optimizer if strategy == "megatron" else model
                batches = iter([models.batch("gpt", step, rank) for step in range(4 - 2 * rank)])
                with shoal.Join(joined, divide_by_initial_world_size=divide) as join:
                    batch = next(batches, None)
                    while join.next(batch is not None):
                        if join.active:
                            models.loss_of(model(batch[0]), batch[1]).backward()
                            batch = next(batches, None)
                        else:
                            assert join.active_ranks == 1
                            join.shadow()
                        optimizer.step()
                        optimizer.zero_grad()
                for (name, parameter), one in zip(net.named_parameters(), expected[divide], strict=True):
                    torch.testing.assert_close(parameter.detach(), one, rtol=0, atol=1e-5, msg=f"{strategy}: {name}")

    on_ranks(trains)


def test_PY05_join_ends_early_or_refuses():
    def trains(rank):
        model, _ = STRATEGIES["ddp"](models.make("gpt"), None, None)
        with shoal.Join(model, throw_on_early_termination=True) as join:
            assert join.next(True)
            models.loss_of(model(models.batch("gpt", 0, rank)[0]), models.batch("gpt", 0, rank)[1]).backward()
            with pytest.raises(shoal.InputsExhausted):
                join.next(rank == 0)
        with pytest.raises(shoal.UsageError, match="within `with shoal.Join"):
            shoal.Join(model).next(True)
        with pytest.raises(shoal.UsageError, match=r"Join\(Linear\): give wrappers"):
            shoal.Join(torch.nn.Linear(2, 2))
        with pytest.raises(shoal.UsageError, match=r"use shoal.Join\(model\), a loop"):
            torch.distributed.algorithms.Join([model])
        synced = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(models.make("cnn"))
        with pytest.raises(shoal.UsageError, match="SyncBatchNorm, whose forward communicates"):
            shoal.Join(shoal.nn.DistributedDataParallel(synced))

    on_ranks(trains)


def whole_batches(ranks, steps=6):
    """One process whose batch norms see the samples of all ranks at once."""
    net = models.make("cnn")
    optimizer = models.adamw(net.parameters())
    losses = []
    for step in range(steps):
        parts = [models.batch("cnn", step, rank) for rank in range(ranks)]
        loss = models.loss_of(net(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.state_dict()


@pytest.mark.parametrize(("ranks", "transport"), [(2, "host"), (3, "host"), (2, "gloo")])
def test_PY05_sync_batch_norm(ranks, transport):
    expected, state = whole_batches(ranks)

    def trains(rank):
        for strategy, wrap in STRATEGIES.items():
            net = models.make("cnn")
            before = dict(net.named_parameters())
            net = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(net, group_over(transport))
            assert list(net.state_dict()) == list(state)
            assert all(parameter is before[name] for name, parameter in net.named_parameters())
            model, optimizer = wrap(net, group_over(transport), None)
            assert_close(losses_of(model, optimizer, "cnn", steps=6), expected)
            torch.testing.assert_close(net.body[1].running_var, state["body.1.running_var"])
            assert net.body[1].num_batches_tracked == 6
            net.eval()
            x = models.batch("cnn", 0, 0)[0]
            plain = models.make("cnn")
            plain.load_state_dict(net.state_dict() if strategy != "fsdp" else model.state_dict())
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain.eval()(x))

    on_ranks(trains, ranks)


def test_PY05_sync_batch_norm_refuses():
    def refuses(rank):
        norm = shoal.nn.SyncBatchNorm(3)
        with pytest.raises(shoal.UsageError, match=r"the input is \[2, 4\]; give \[n, 3, ...\]"):
            norm(torch.ones(2, 4))
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            torch.save(norm, "/dev/null")

    on_ranks(refuses)


@pytest.mark.parametrize("ranks", [2, 4])
def test_PY05_shard_gossip(ranks):
    """Hosts of ranks / 2 ranks; a complete topology without overlap and SGD equal one process."""

    def expected():
        net = models.make("gpt")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(5):
            total = 0.0
            for rank in range(ranks):
                x, y = models.batch("gpt", step, rank)
                loss = models.loss_of(net(x), y) / ranks
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    one = expected()

    def trains(rank):
        inside, across = shoal.distributed.host_groups(size=ranks // 2)
        assert (inside.size, across.size) == (ranks // 2, 2)
        for overlap in (False, True):
            net = models.make("gpt")
            model = shoal.nn.FullyShardedDataParallel(net, inside, auto_wrap_policy=models.Block)
            rates = {"lr": 0.1, "momentum": 0.9}
            optimizer = shoal.optim.ShardGossipOptimizer(
                model, across, torch.optim.SGD, topology="complete", overlap=overlap, **rates
            )
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            losses = []
            for step in range(5):
                x, y = models.batch("gpt", step, rank)
                loss = models.loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(mean_loss(loss))
            if overlap:
                assert losses[4] < losses[0]
                assert optimizer.consensus_distance() > 0
                with optimizer.mean_parameters():
                    mean = model.full_state_dict()["norm.weight"]
                other = mean.clone()
                dist.broadcast(other, 0)
                torch.testing.assert_close(mean, other)
                optimizer.global_avg()
            else:
                assert_close(losses, one)
            assert optimizer.consensus_distance() < 1e-6

    on_ranks(trains, ranks)


def test_PY05_shard_gossip_names_wrong_options():
    def refuses(rank):
        inside, across = shoal.distributed.host_groups(size=1)
        model = shoal.nn.FullyShardedDataParallel(models.make("gpt"), inside)
        with pytest.raises((shoal.UsageError, TypeError), match="alpha"):
            shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, alpha=1, **RATES)
        with pytest.raises(shoal.UsageError, match="ShardGossipOptimizer: its first argument is the FullyShardedDataParallel"):
            shoal.optim.ShardGossipOptimizer(model.module, across, torch.optim.AdamW, **RATES)

    on_ranks(refuses)
