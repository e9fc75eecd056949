"""ELA02, ELA12: errors and deaths within an elastic step leave the training as after the last complete one."""

import os
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import shoal
from elastic_loop import X, Y, ddp, distance, flat, fsdp, loss_of, make_net, make_optimizer, megatron, trained_alone, zero2
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
