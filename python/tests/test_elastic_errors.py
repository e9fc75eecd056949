"""ELA01, ELA02, ELA10, PY05: errors in an elastic loop, and wrong uses of it."""

import os
import signal
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shoal
from elastic_loop import Samples, X, Y, ddp, distance, flat, fsdp, loss_of, make_net, make_optimizer, megatron, trained_alone, zero2
from ranks import Ranks, on_ranks


def test_ELA01_what_a_program_raises_comes_through():
    class Mine(Exception):
        pass

    class MyUsage(shoal.UsageError):
        pass

    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer)

        def fails(kind):
            raise kind("on purpose")

        for kind in (Mine, MyUsage, KeyboardInterrupt, SystemExit):
            with pytest.raises(kind, match="on purpose") as raised:
                elastic.step(1, lambda: fails(kind), optimizer.step)
            assert "in fails" in "".join(traceback.format_exception(raised.value))
        with pytest.raises(Mine):
            elastic.together(lambda: fails(Mine))
        with pytest.raises(shoal.UsageError, match="second function of step.. has failed: on purpose"):
            elastic.step(1, lambda: loss_of(model(X), Y).backward(), lambda: fails(shoal.CommError))

    on_ranks(run)


def test_ELA02_an_error_that_compute_catches_makes_no_wrong_step():
    def run(rank):
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)

        def compute():
            loss = loss_of(model(X[rank::3]), Y[rank::3])
            if rank == 1 and elastic.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss.backward()
            except Exception:  # as in loops that skip bad batches
                pass

        while elastic.steps < 4:
            elastic.step(1, compute, optimizer.step)
            optimizer.zero_grad()
        return flat(net)

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert outcomes[0][0] and outcomes[0][1] == outcomes[2][1], outcomes
    net = make_net()
    optimizer = make_optimizer(net)
    for step in range(4):
        ranks = (0, 1, 2) if step < 2 else (0, 2)
        for rank in ranks:
            (loss_of(net(X[rank::3]), Y[rank::3]) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(outcomes[0][1], flat(net)) < 1e-12


@pytest.mark.parametrize("says_so", ["", "within", "afterwards"])
@pytest.mark.parametrize("wrap", [ddp, zero2, megatron])
def test_ELA02_an_error_before_backward_that_the_loop_catches(wrap, says_so):
    """Without abandon_step() it would put that rank one batch behind the others."""

    def run(rank):
        net = make_net()
        model, optimizer = wrap(net)
        elastic = shoal.Elastic(model, optimizer)
        trained, skipped = [], 0
        abandon_step = (optimizer if wrap is megatron else model).abandon_step
        for batch in range(8):

            def compute(batch=batch):
                try:
                    fails = rank == 1 and batch == 3
                    if fails and not says_so:
                        raise (ValueError if wrap is ddp else shoal.UsageError)("a bad sample")
                    prediction = model(X[6 * batch + 2 * rank :][:2])
                    if fails:
                        raise ValueError("a bad label")
                    loss_of(prediction, Y[6 * batch + 2 * rank :][:2]).backward()
                except (ValueError, shoal.StepAbandoned) as error:
                    if says_so == "within":
                        abandon_step()
                        raise KeyError("skipped") from error
                    raise

            try:
                elastic.step(2, compute, optimizer.step)
                trained.append(batch)
            except (ValueError, KeyError, shoal.StepAbandoned, shoal.UsageError) as error:
                if "has thrown on rank 1 before its" in str(error):
                    raise
                skipped += 1
                if says_so == "afterwards":
                    abandon_step()
            optimizer.zero_grad()
        return flat(net), trained, skipped

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    if not says_so:
        for outcome in outcomes:
            assert not outcome[0] and "UsageError" in outcome[1] and "has thrown on rank 1 before its" in outcome[1], outcomes
        return
    assert all(outcome[0] and outcome[1][1:] == ([0, 1, 2, 4, 5, 6, 7], 1) for outcome in outcomes), outcomes
    net = make_net()
    optimizer = make_optimizer(net)
    for batch in (0, 1, 2, 4, 5, 6, 7):
        loss_of(net(X[6 * batch :][:6]), Y[6 * batch :][:6]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(distance(outcome[1][0], flat(net)) < 1e-12 for outcome in outcomes)


@pytest.mark.parametrize("wrap", [zero2, fsdp])
def test_ELA02_a_loss_scaler_forgets_a_step_that_is_undone(wrap):
    def run(rank):
        net = make_net().float()
        model, optimizer = wrap(net)
        scaler = shoal.amp.GradScaler()
        elastic = shoal.Elastic(model, optimizer, state={"scaler": scaler}, on_change=lambda change: None)
        x, y = X.float(), Y.float()

        def prepare():
            scaler.unscale_(optimizer)
            if rank == 1 and elastic.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        def update():
            scaler.step(optimizer)
            scaler.update()

        results = []
        while elastic.steps < 5:
            results.append(elastic.step(1, lambda: scaler.scale(loss_of(model(x), y)).backward(), update, prepare))
            optimizer.zero_grad()
        return results

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    for rank in (0, 2):
        assert outcomes[rank][1] == [True, True, False, True, True, True], outcomes[rank]


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


@pytest.mark.parametrize("wrap", [ddp, zero2])
def test_ELA02_a_rank_whose_update_has_failed_has_left_the_job(wrap):
    def run(rank):
        net = make_net()
        model, optimizer = wrap(net)
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)

        def update():
            if rank == 1 and elastic.steps == 2:
                raise ValueError("on purpose")
            optimizer.step()

        def compute():
            loss_of(model(X[rank::3]), Y[rank::3]).backward()

        try:
            while elastic.steps < 5:
                elastic.step(1, compute, update)
                optimizer.zero_grad()
        except ValueError:
            for call in (lambda: elastic.step(1, compute, update), lambda: elastic.together(lambda: 1), elastic.recover):
                with pytest.raises(shoal.UsageError, match="an update has failed on this rank"):
                    call()
            return "failed"
        return elastic.together(lambda: flat(model)), dist.get_world_size()

    begun = time.monotonic()
    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert time.monotonic() - begun < 15
    assert outcomes[1][1] == "failed", outcomes[1]
    assert outcomes[0][1] == outcomes[2][1] and outcomes[0][1][1] == 2, outcomes


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


@pytest.mark.parametrize("wrap", [zero2, megatron, fsdp])
def test_ELA02_a_state_that_was_loaded_before_an_elastic_loop(wrap):
    def run(rank):
        net = make_net()
        model, optimizer = wrap(net)
        loss_of(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)

        def compute():
            if rank == 1 and elastic.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model(X), Y).backward()

        while elastic.steps < 4:
            elastic.step(1, compute, optimizer.step)
            optimizer.zero_grad()
        del elastic
        loss_of(model(X), Y).backward()
        optimizer.step()
        return flat(net) if wrap is not fsdp else flat(model)

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert outcomes[0][0] and outcomes[2][0] and outcomes[0][1] == outcomes[2][1], outcomes
    assert distance(outcomes[0][1], flat(trained_alone(6))) < 1e-12


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


class Counts(torch.nn.Module):
    """A module that replaces its buffer in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside = torch.nn.Linear(6, 1).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.inside(x)


def test_ELA02_a_buffer_that_forward_replaces_is_as_after_the_last_complete_step():
    def run(rank):
        net = Counts()
        model = shoal.nn.DistributedDataParallel(net, broadcast_buffers=False)
        optimizer = make_optimizer(net)
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)

        def compute():
            loss = loss_of(model(X), Y)
            if rank == 1 and elastic.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()

        counts = []
        while elastic.steps < 5:
            elastic.step(1, compute, optimizer.step)
            optimizer.zero_grad()
            counts.append((elastic.steps, int(net.calls)))
        return counts

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    for rank in (0, 2):
        assert outcomes[rank][1] == [(1, 1), (2, 2), (2, 2), (3, 3), (4, 4), (5, 5)], outcomes[rank]


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
        for options, text in {"min_ranks": 3, "shares": 2, "keep_global_batch": 5, "straggler_seconds": -1}.items():
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


def test_ELA12_an_error_before_backward_in_the_warm_up_of_local_updates():
    def run(rank):
        net = make_net()
        optimizer = shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2, warmup_steps=3)
        elastic = shoal.Elastic(net, optimizer)

        def compute(step):
            if step == 1 and rank == 1:
                raise ValueError("a bad sample")
            loss_of(net(X), Y).backward()

        for step in range(2):
            try:
                elastic.step(len(X), lambda: compute(step), optimizer.step)
                optimizer.zero_grad()
            except ValueError:
                elastic.step(len(X), lambda: compute(2), optimizer.step)

    for outcome in Ranks(run, ranks=2).outcomes(timeout=30):
        assert "UsageError" in str(outcome) and "before its backward" in str(outcome), outcome


@pytest.mark.parametrize("elastic", [False, True])
def test_ELA12_local_updates_reset_the_optimizer(elastic):
    def run(rank):
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = shoal.optim.LocalUpdates(net, inner, every=2, outer=shoal.optim.Averaging(), reset_optimizer=True)
        loop = shoal.Elastic(net, optimizer) if elastic else None
        for _ in range(5):
            optimizer.zero_grad()
            if loop is None:
                net(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            else:
                loop.step(1, lambda: net(torch.ones(1, 1)).sum().backward(), optimizer.step)
        return net.weight.item()

    for outcome in Ranks(run, ranks=2).outcomes(timeout=30):
        weight = outcome[1]
        assert abs(weight - (-0.1 * (2 * (1 + 1.9) + 1))) < 1e-6, weight
