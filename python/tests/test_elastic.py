"""ELA01, ELA05, ELA06: ranks of a Python program die and come, and the others go on."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks, on_ranks

SAMPLES, EPOCHS, BATCH = 48, 2, 4
torch.manual_seed(3)
X = torch.randn(SAMPLES, 6, dtype=torch.float64)
Y = X.sin().sum(1, keepdim=True)


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def flat(net):
    return torch.cat([value.flatten() for value in net.state_dict().values()]).tolist()


def distance(ours, expected):
    return max(abs(a - b) for a, b in zip(ours, expected, strict=True))


def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, X[index], Y[index]


class DyingAdamW(torch.optim.AdamW):
    """Ends the process in the middle of a chosen step of a part of the parameters."""

    dies_after = None

    def step(self, closure=None):
        super().step(closure)
        if DyingAdamW.dies_after is not None and self.param_groups[0]["params"]:
            DyingAdamW.dies_after -= 1
            if DyingAdamW.dies_after < 0:
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.fill_(1e9)
                os.kill(os.getpid(), signal.SIGKILL)


def ddp(net):
    return shoal.nn.DistributedDataParallel(net), make_optimizer(net)


def zero1(net):
    optimizer = shoal.optim.OSS(net.parameters(), DyingAdamW, lr=1e-2)
    return shoal.nn.DistributedDataParallel(net), optimizer


def zero2(net):
    optimizer = shoal.optim.OSS(net.parameters(), DyingAdamW, lr=1e-2)
    return shoal.nn.ShardedDataParallel(net, optimizer), optimizer


def megatron(net):
    return net, shoal.optim.DistributedOptimizer(net, DyingAdamW, element_wise=True, lr=1e-2)


def fsdp(net):
    model = shoal.nn.FullyShardedDataParallel(net, auto_wrap_policy=torch.nn.Linear)
    return model, shoal.optim.FullyShardedOptimizer(model, DyingAdamW, element_wise=True, lr=1e-2)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def local_sgd(net):
    """With an exchange after each step, and SGD, the mean of the parameters is that of a step with the mean gradient."""
    return net, shoal.optim.LocalUpdates(net, sgd(net), every=1, outer=shoal.optim.Averaging())


STRATEGIES = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "megatron": megatron, "fsdp": fsdp, "local_sgd": local_sgd}


def loss_of(prediction, y):
    return ((prediction - y) ** 2).mean()


class Moment:
    """Ends this process once it has come to the place `where` of step `step`."""

    def __init__(self, rank, victim, where, step):
        self.step = step
        self.where = where if rank == victim else None

    def __call__(self, where, step):
        if (where, step) == (self.where, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


def train(moment, seen, wrap=ddp, **options):
    """The loop of a user. seen: gets (epoch, step, indices) of each step, complete ones and that in which this rank dies."""
    net = make_net()
    model, optimizer = wrap(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    sampler = shoal.data.DistributedSampler(Samples(), seed=1)
    kept = options.get("keep_global_batch", 0)
    elastic = shoal.Elastic(model, optimizer, sampler, state={"schedule": schedule}, **options)
    for epoch in range(elastic.first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        while elastic.in_epoch():
            batch = elastic.batch_size if kept else BATCH
            for indices, x, y in torch.utils.data.DataLoader(Samples(), batch_size=batch, sampler=sampler):
                step = elastic.steps

                def compute(begin=0, end=None):
                    moment("forward", step)
                    loss = loss_of(model(x[begin:end]), y[begin:end])
                    moment("backward", step)
                    loss.backward()
                    moment("computed", step)

                def update():
                    moment("update", step)
                    optimizer.step()
                    moment("updated", step)

                seen.append((epoch, step, indices.tolist()))
                if not elastic.step(len(x), compute, update):
                    seen.pop()
                    break
                optimizer.zero_grad()
                schedule.step()
        moment("between", epoch)

        def evaluate():
            with torch.no_grad():
                total = loss_of(model(X), Y)
            moment("evaluation", epoch)
            dist.all_reduce(total)
            return total.item() / dist.get_world_size()

        assert elastic.together(evaluate) > 0
    return elastic.together(lambda: flat(model))


def replay(steps, optimizer_of=make_optimizer):
    """The same training in one process. steps: by step the samples of each rank."""
    net = make_net()
    optimizer = optimizer_of(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    for parts in steps:
        for part in parts:
            (loss_of(net(X[part]), Y[part]) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return flat(net)


PLACES = ["forward", "backward", "computed", "update", "in update", "updated", "between", "evaluation"]


# Under DDP a rank's update is its own; under local SGD what the victim has trained since the last exchange is lost, so that no
# one process does the same.
NOT_HERE = {"ddp": ["in update"], "local_sgd": ["update", "in update", "updated"]}
DEATHS = [
    (name, victim, where)
    for name in STRATEGIES
    for victim in (0, 2)
    for where in PLACES
    if where not in NOT_HERE.get(name, ())
]


@pytest.mark.parametrize(("strategy", "victim", "where"), DEATHS)
def test_ELA01_a_rank_of_a_python_program_dies(strategy, victim, where, tmp_path):
    died_at = 0 if where in ("between", "evaluation") else 2

    def run(rank):
        seen = []
        end = Moment(rank, victim, where, died_at)

        def moment(place, at):
            if (place, at) == (end.where, end.step):
                torch.save(seen, tmp_path / "victim")
            if (place, at, where, rank) == ("update", died_at, "in update", victim):
                torch.save(seen, tmp_path / "victim")
                DyingAdamW.dies_after = 0
            end(place, at)

        return train(moment, seen, STRATEGIES[strategy]), seen, dist.get_rank(), dist.get_world_size()

    outcomes = Ranks(run, ranks=3).outcomes(timeout=60)
    assert outcomes[victim][1] == "exit code -9"
    left = [rank for rank in range(3) if rank != victim]
    for number, rank in enumerate(left):
        assert outcomes[rank][0], outcomes[rank]
        parameters, _, at_end, size = outcomes[rank][1]
        assert (at_end, size) == (number, 2)
        assert parameters == outcomes[left[0]][1][0]
    steps = {}
    # Others never get what the victim's backward would have given, and a sharded step needs the victim in its commit.
    undone = where in ("forward", "backward") or (where == "computed" and strategy != "ddp")
    for seen in [torch.load(tmp_path / "victim")[: -1 if undone else None], *(outcomes[rank][1][1] for rank in left)]:
        for epoch, step, indices in seen:
            steps.setdefault((epoch, step), []).append(indices)
    optimizer_of = sgd if strategy == "local_sgd" else make_optimizer
    for epoch in range(EPOCHS):
        taken = sorted(index for (at, _), parts in steps.items() if at == epoch for part in parts for index in part)
        assert taken == list(range(SAMPLES))
    assert distance(outcomes[left[0]][1][0], replay([steps[key] for key in sorted(steps)], optimizer_of)) < 1e-12


def test_ELA05_a_python_program_keeps_the_global_batch():
    def losses_of(victims):
        def run(rank):
            seen = []
            moments = [Moment(rank, victim, where, step) for victim, where, step in victims]

            def moment(place, at):
                for one in moments:
                    one(place, at)

            parameters = train(moment, seen, keep_global_batch=16, shares=4)
            return parameters, seen

        return Ranks(run, ranks=4).outcomes(timeout=60)

    calm = losses_of([])
    stormy = losses_of([(1, "forward", 1), (0, "computed", 3), (3, "updated", 4)])
    assert [outcome[0] for outcome in stormy] == [False, False, True, False]
    assert distance(stormy[2][1][0], calm[2][1][0]) < 1e-12
    assert [each[1] for each in stormy[2][1][1]] == list(range(6))


def test_ELA01_torch_distributed_is_that_of_the_ranks_that_are_left():
    def run(rank):
        changes = []
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        elastic = shoal.Elastic(model, make_optimizer(net), on_change=changes.append)
        former = dist.group.WORLD
        pair = dist.new_group([0, 2])
        if rank == 1:
            time.sleep(0.3)  # until the others have made the group
            os.kill(os.getpid(), signal.SIGKILL)
        assert not elastic.step(1, lambda: loss_of(model(X), Y).backward(), lambda: None) and elastic.steps == 0
        assert [str(change).split(";")[0] for change in changes] == ["rank 1 has ended"]
        assert (changes[0].lost, changes[0].ranks, changes[0].generation) == ([1], 2, elastic.generation)
        assert (dist.get_rank(), dist.get_world_size()) == (0 if rank == 0 else 1, 2)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]
        found = [None, None]
        dist.all_gather_object(found, rank)
        assert found == [0, 2]
        again = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=again)
        assert tensor.tolist() == [4, 4, 4]
        for old in (former, pair):
            with pytest.raises((shoal.CommError, ValueError)):
                dist.all_reduce(tensor, group=old)
        return "went on"

    outcomes = Ranks(run, ranks=3).outcomes(timeout=60)
    assert [outcomes[0][1], outcomes[2][1]] == ["went on"] * 2, outcomes


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
        with pytest.raises(shoal.UsageError, match="communicated"):
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
        with pytest.raises(shoal.JobLost, match="needs min_ranks = 2.*has none yet"):
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
            (model, make_optimizer(make_net())): "parameter",
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


PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import shoal

torch.set_num_threads(1)
dist.init_process_group("shoal", **eval(sys.argv[1]))
torch.manual_seed(0)
net = torch.nn.Linear(4, 1).double()


class CountingSGD(torch.optim.Optimizer):
    # Its state has an integer, and what it computes with it differs from what it would with a float32.
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                assert isinstance(state["step"], int)
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - 0.999 ** state["step"]) * group["betas"][0])


adamw = torch.optim.AdamW, {"lr": 1e-2}
if sys.argv[2] in ("zero1", "zero2"):
    optimizer = shoal.optim.OSS(net.parameters(), adamw[0], **adamw[1])
elif sys.argv[2] == "megatron":
    model, optimizer = net, shoal.optim.DistributedOptimizer(net, adamw[0], **adamw[1])
elif sys.argv[2] in ("fsdp", "hybrid"):
    sharding = "hybrid_shard" if sys.argv[2] == "hybrid" else "full_shard"
    model = shoal.nn.FullyShardedDataParallel(net, sharding_strategy=sharding)
    optimizer = shoal.optim.FullyShardedOptimizer(model, adamw[0], **adamw[1])
else:
    optimizer = CountingSGD(net.parameters(), 1e-2)
if sys.argv[2] == "zero2":
    model = shoal.nn.ShardedDataParallel(net, optimizer)
elif sys.argv[2] in ("ddp", "zero1"):
    model = shoal.nn.DistributedDataParallel(net)
if sys.argv[2] == "ddp":
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1001)  # changes betas, too
else:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
x = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4)
sampler = shoal.data.DistributedSampler(x, seed=1)
elastic = shoal.Elastic(model, optimizer, sampler, state={"schedule": schedule}, keep_global_batch=12, shares=12)
first = dist.get_rank()
for epoch in range(elastic.first_epoch, 200):
    sampler.set_epoch(epoch)
    while elastic.in_epoch():
        for batch in torch.utils.data.DataLoader(x, batch_size=elastic.batch_size, sampler=sampler):
            def compute(begin, end):
                part = batch[begin:end]
                ((model(part) - part.sum(1, keepdim=True)) ** 2).mean().backward()
            complete = elastic.step(len(batch), compute, optimizer.step)
            if complete:
                optimizer.zero_grad()
                schedule.step()
            if not complete:
                break
    if epoch == 20 and first == 1 and not elastic.joined:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(sys.argv) == 3 and elastic.generation > 1 and dist.get_world_size() == 1 and epoch < 180:
        time.sleep(0.05)  # until the rank that is started in its place has come
weight = elastic.together(lambda: {name[-6:]: value for name, value in model.state_dict().items()}["weight"])
print("weights", [round(float(w), 12) for w in weight.flatten()], "rate", schedule.get_last_lr(), "steps", elastic.steps,
      "joined" if elastic.joined else "stayed", flush=True)
"""


@pytest.mark.parametrize(("method", "strategy"), [("{}", "ddp"), ('{"init_method": "shoal://"}', "fsdp")])
def test_ELA06_a_rank_of_a_python_program_is_replaced(method, strategy, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    line = [sys.executable, program, method, strategy]
    launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "2", "--elastic", "1:2", "--max-restarts", "1", "--"]
    ended = subprocess.run([*launch, *line], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [text[text.index("weights") :] for text in ended.stdout.splitlines() if "weights" in text]
    assert sorted(text.split()[-1] for text in said) == ["joined", "stayed"], ended.stdout + ended.stderr
    assert len({text.rsplit(" ", 1)[0] for text in said}) == 1, said
    assert "steps 1000 " in said[0], said
    alone = subprocess.run([*launch[:2], "-n", "1", "--", *line], capture_output=True, text=True, timeout=100)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout[alone.stdout.index("weights") :].rsplit(" ", 1)[0] == said[0].rsplit(" ", 1)[0], (alone.stdout, said)


def can_make_hosts():
    return os.geteuid() == 0 and subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"]).returncode == 0


def on_two_hosts(strategy, folder, ranks=1):
    """(exit code, output) of the launchers of two hosts with so many ranks each. Rank 1 kills itself."""
    if not can_make_hosts():
        pytest.skip("no namespaces of processes")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launchers = []
    for node in "01":
        host = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", str(ranks), "--nnodes", "2", "--node-rank", node, "--port", port]
        line = ["--elastic", "1", "--", sys.executable, program, "{}", strategy, "without newcomers"]
        launchers.append(subprocess.Popen([*host, *launch, *line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    return [(launcher.returncode, text) for launcher, text in zip(launchers, said, strict=True)]


def test_ELA01_ELA04_the_last_rank_of_a_host_dies_and_a_python_program_goes_on(tmp_path):
    first, second = on_two_hosts("ddp", tmp_path)
    assert first[0] == 0 and second[0] == 137, (first, second)
    assert "rank 1 has ended; 1 rank goes on after step 105" in first[1], first[1]
    assert "steps 1000 stayed" in first[1], first[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ELA04_shards_that_each_host_has_outlive_ranks_and_a_host(ranks, tmp_path):
    hosts = on_two_hosts("hybrid", tmp_path, ranks)
    assert [code for code, _ in hosts] == [0, 0 if ranks == 2 else 137], hosts
    said = [line[line.index("weights") :] for _, text in hosts for line in text.splitlines() if "weights" in line]
    assert len(said) == 2 * ranks - 1 and len(set(said)) == 1 and "steps 1000 stayed" in said[0], hosts
    alone = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "1", "--", sys.executable, tmp_path / "program.py", "{}", "hybrid", ""]
    assert subprocess.run(alone, capture_output=True, text=True, timeout=100).stdout.strip().endswith(said[0]), said


def test_ELA04_sharded_optimizers_are_refused_on_several_hosts(tmp_path):
    for code, said in on_two_hosts("fsdp", tmp_path):
        assert code != 0 and "UsageError: Elastic" in said, said
