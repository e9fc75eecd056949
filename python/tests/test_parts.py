"""SyncBatchNorm and ShardGossipOptimizer in Python."""

import copy

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, train_alone
from ranks import on_ranks
from test_wrappers import RATES, STRATEGIES, group_over, losses_of


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


def test_PY05_a_batch_norm_with_several_names_is_converted_under_all():
    def converts(rank):
        net = torch.nn.Module()
        net.first = torch.nn.BatchNorm1d(3, bias=False)
        net.second = net.first
        net.inside = torch.nn.Sequential(net.first, torch.nn.BatchNorm1d(3))
        net.nothing = None
        converted = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        assert converted is net and isinstance(net.first, shoal.nn.SyncBatchNorm) and net.first.bias is None
        assert net.second is net.first and net.inside[0] is net.first
        assert isinstance(net.inside[1], shoal.nn.SyncBatchNorm) and net.inside[1] is not net.first
        plain = shoal.nn.SyncBatchNorm(3, bias=False)
        assert plain.bias is None and plain(torch.randn(4, 3)).shape == (4, 3)
        average = torch.optim.swa_utils.AveragedModel(net).module
        assert average.inside[0] is average.first is not net.first
        average.first(torch.arange(3.0) + torch.full((4, 3), rank))  # the same ranks, whose mean is 0.5, 1.5, 2.5
        torch.testing.assert_close(average.first.running_mean, torch.tensor([0.05, 0.15, 0.25]))
        assert net.first.running_mean.tolist() == [0, 0, 0]

    on_ranks(converts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_SDP09_sync_batch_norm_leaves_running_statistics_while_track_running_stats_is_off(ranks, momentum):
    """As programs switch it for adversarial passes (PyTorch's attribute may change at any time)."""

    def runs(rank):
        plain = torch.nn.BatchNorm1d(3, momentum=momentum)
        norm = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        generator = torch.Generator().manual_seed(0)
        for tracks, counts in ((True, True), (False, True), (True, True), (True, False), (False, False)):
            x = torch.randn(4 * ranks, 3, generator=generator) * 2 + 1
            for trains in (True, False):
                results = []
                for one, samples in ((plain, x), (norm, x.chunk(ranks)[rank])):
                    one.track_running_stats = tracks
                    if not counts:
                        one.num_batches_tracked = None
                    results.append(one.train(trains)(samples))
                torch.testing.assert_close(results[1], results[0].chunk(ranks)[rank])
            for key, value in plain.state_dict().items():
                torch.testing.assert_close(norm.state_dict()[key], value, msg=f"{key} {tracks} {counts}")

    on_ranks(runs, ranks)


def test_PY05_sync_batch_norm_refuses():
    def refuses(rank):
        norm = shoal.nn.SyncBatchNorm(3)
        with pytest.raises(shoal.UsageError, match=r"the input is \[2, 4\]; give \[n, 3, ...\]"):
            norm(torch.ones(2, 4))
        with pytest.raises(TypeError, match="cannot be pickled.*deepcopy"):
            torch.save(norm, "/dev/null")

    on_ranks(refuses)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "host"), (4, "host"), (2, "gloo"), (4, "gloo")])
def test_PY05_shard_gossip(ranks, transport):
    """Hosts of ranks / 2 ranks; a complete topology without overlap and SGD equal one process."""
    net = models.make("gpt")
    one = train_alone(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), steps=5, ranks=ranks)

    def trains(rank):
        inside, across = shoal.distributed.host_groups(group_over(transport), size=ranks // 2)
        assert (inside.size, across.size) == (ranks // 2, 2)
        for overlap in (False, True):
            net = models.make("gpt")
            model = shoal.nn.FullyShardedDataParallel(net, inside, auto_wrap_policy=models.Block)
            rates = {"lr": 0.1, "momentum": 0.9}
            optimizer = shoal.optim.ShardGossipOptimizer(
                model, across, torch.optim.SGD, topology="complete", overlap=overlap, **rates
            )
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            losses = losses_of(model, optimizer, "gpt", steps=5, schedule=schedule)
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


def test_PY05_shard_gossip_has_no_checkpoints_while_it_shows_the_mean(tmp_path):
    def trains(rank):
        inside, across = shoal.distributed.host_groups(size=1)
        net = torch.nn.Linear(3, 1)
        model = shoal.nn.FullyShardedDataParallel(net, inside)
        optimizer = shoal.optim.ShardGossipOptimizer(model, across, torch.optim.SGD, topology="complete", lr=0.1)
        training = shoal.checkpoint.TrainingState(model, optimizer)
        (model(torch.ones(2, 3)).sum() * (rank + 1)).backward()
        optimizer.step()
        own = model.full_state_dict()["weight"]
        shoal.checkpoint.save(tmp_path, training, step=1)
        with optimizer.mean_parameters():
            mean = model.full_state_dict()["weight"]
            with pytest.raises(shoal.UsageError, match=r"within a scope of mean_parameters\(\)"):
                shoal.checkpoint.save(tmp_path, training, step=2)
            with pytest.raises(shoal.UsageError, match=r"within a scope of mean_parameters\(\)"):
                shoal.checkpoint.load(tmp_path, training)
        assert not torch.equal(own, mean)
        assert torch.equal(model.full_state_dict()["weight"], own)
        alone = torch.nn.Linear(3, 1)
        shoal.checkpoint.load_module(tmp_path, alone)
        torch.testing.assert_close(alone.weight.detach(), mean)
        assert shoal.checkpoint.load(tmp_path, training).exact
        assert torch.equal(model.full_state_dict()["weight"], own)

    on_ranks(trains)


def test_PY05_shard_gossip_names_wrong_options():
    def refuses(rank):
        inside, across = shoal.distributed.host_groups(size=1)
        model = shoal.nn.FullyShardedDataParallel(models.make("gpt"), inside)
        with pytest.raises((shoal.UsageError, TypeError), match="alpha"):
            shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, alpha=1, **RATES)
        with pytest.raises(shoal.UsageError, match="ShardGossipOptimizer: its first argument is the FullyShardedDataParallel"):
            shoal.optim.ShardGossipOptimizer(model.module, across, torch.optim.AdamW, **RATES)

    on_ranks(refuses)
