"""ELA01, ELA10, PY05: uses of Elastic that are wrong or come too late say what to do."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shoal
from elastic_loop import Samples, X, Y, loss_of, make_net, make_optimizer, zero2
from ranks import Ranks, on_ranks


def test_ELA10_communication_outside_of_together_says_where_it_belongs():
    def run(rank):
        net = make_net()
        elastic = shoal.Elastic(shoal.nn.DistributedDataParallel(net), make_optimizer(net))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(shoal.CommError, match="rank 1 .* is gone.*; between steps, communicate in Elastic's together"):
            dist.all_reduce(torch.ones(1))
        return elastic.generation

    assert Ranks(run, ranks=2).outcomes(timeout=30)[0][:2] == (True, 1)


def test_ELA10_a_job_lost_in_an_update_names_who_is_waited_for_and_the_checkpoint(tmp_path):
    stopped = tmp_path / "pid"

    def run(rank):
        net = make_net()
        model, optimizer = zero2(net)
        elastic = shoal.Elastic(model, optimizer, checkpoints=tmp_path / "run")

        def update():
            if rank == 1:
                stopped.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.step()

        try:
            elastic.step(1, lambda: loss_of(model(X), Y).backward(), update)
        except shoal.JobLost as error:
            return str(error)
        finally:
            os.kill(int(stopped.read_text()), signal.SIGKILL)

    outcomes = Ranks(run, ranks=2, init={"timeout": timedelta(seconds=3)}).outcomes(timeout=30)
    awaited = f"rank 1 (pid {stopped.read_text()}; the launcher's number), alive, but stopped or not in step()"
    shards = "no shard is lost: the ranks that are left have all parameters and their state"
    lost = f"the update of a step has waited 3 s for {awaited}; {shards} ({tmp_path / 'run'} has no checkpoint yet)"
    assert outcomes[0] == (True, lost), outcomes


def test_ELA01_what_belongs_between_steps_is_refused_within_one():
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer)
        calls = {
            "together": lambda: elastic.together(lambda: 1),
            "step": lambda: elastic.step(1, lambda: None, optimizer.step),
            "recover": elastic.recover,
        }
        for name, call in calls.items():
            with pytest.raises(shoal.UsageError, match=rf"{name}\(\) is called within step"):
                elastic.step(1, call, optimizer.step)
        assert elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)

    on_ranks(run)


def test_ELA02_ranks_agree_on_options_again_after_an_elastic_loop():
    def run(rank):
        net = make_net()
        model, optimizer = zero2(net)
        elastic = shoal.Elastic(model, optimizer)
        elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(shoal.DisagreeError, match="options"):
            elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)
        del elastic
        optimizer.zero_grad()
        loss_of(model(X), Y).backward()
        with pytest.raises(shoal.DisagreeError, match="options"):
            optimizer.step()

    on_ranks(run)


def test_ELA01_a_group_of_former_ranks_in_a_step_is_an_error_and_no_endless_loop():
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)
        former = shoal.distributed.group_of()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)
        optimizer.zero_grad()
        with pytest.raises(shoal.CommError, match="ended with generation 1") as raised:
            elastic.step(1, lambda: shoal._C.agree(former, "x", ["x"]), optimizer.step)
        return raised.value.group_ended

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert [outcomes[0][1], outcomes[1][1]] == [True, True], outcomes


def test_ELA01_a_process_group_of_former_ranks_is_named_and_can_be_made_again():
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        kept = dist.new_group()
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)
        optimizer.zero_grad()
        groups = {}

        def sum_of_ranks():
            if elastic.generation not in groups:
                groups[elastic.generation] = dist.new_group()
            total = torch.ones(1)
            dist.all_reduce(total, group=groups[elastic.generation])
            return total.item()

        total = elastic.together(sum_of_ranks)
        with pytest.raises(shoal.CommError, match="ended with generation 1") as raised:
            elastic.together(lambda: dist.all_reduce(torch.ones(1), group=kept))
        return total, raised.value.group_ended

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert [outcomes[0][1], outcomes[1][1]] == [(2, True), (2, True)], outcomes


def test_ELA10_too_few_ranks_are_left(tmp_path):
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer, min_ranks=2, checkpoints=tmp_path / "run")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(shoal.JobLost, match="needs min_ranks = 2.*has no checkpoint yet"):
            elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)
        return "lost"

    assert Ranks(run, ranks=2).outcomes(timeout=30)[0][:2] == (True, "lost")


def test_PY05_elastic_names_what_it_does_not_take():
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        others = torch.utils.data.DistributedSampler(Samples())
        oss = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=1e-2)
        half = shoal.nn.DistributedDataParallel(make_net(), dist.new_group([rank], use_local_synchronization=True))
        for arguments, text in {
            (net, optimizer): "Sequential with AdamW is not supported",
            (model, shoal.optim.DistributedOptimizer(make_net(), torch.optim.AdamW, lr=1e-2)): "is not supported",
            (shoal.nn.FullyShardedDataParallel(make_net()), oss): "FullyShardedDataParallel with OSS is not supported",
            (model, torch.optim.LBFGS(net.parameters())): "L-BFGS",
            (model, optimizer, others): "give a shoal.data.DistributedSampler",
            (half, make_optimizer(half.module)): "give it the default one",
            (model, make_optimizer(net[0])): "Elastic: the optimizer does not have parameter 2.weight",
            (model, make_optimizer(make_net())): "Elastic: the optimizer does not have parameter 0.weight",
        }.items():
            with pytest.raises(shoal.UsageError, match=text):
                shoal.Elastic(*arguments)
        for options, text in {"min_ranks": 3, "batch_slices": 2, "keep_global_batch": 5, "straggler_seconds": -1}.items():
            with pytest.raises(shoal.UsageError, match=options):
                shoal.Elastic(model, optimizer, **{options: text})
        synced = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(6)))
        with pytest.raises(shoal.UsageError, match="0 is a SyncBatchNorm"):
            shoal.Elastic(shoal.nn.DistributedDataParallel(synced), torch.optim.SGD(synced.parameters(), lr=0.1))
        with pytest.raises(shoal.UsageError, match="state has mine, a AdamW"):
            shoal.Elastic(model, optimizer, state={"mine": optimizer})
        with pytest.raises(TypeError, match="minimum_ranks"):
            shoal.Elastic(model, optimizer, minimum_ranks=1)
        shoal.Elastic(model, optimizer).step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step)

    on_ranks(run)
