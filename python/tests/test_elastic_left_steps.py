"""ELA01, ELA02, ELA05: steps that a program leaves by an error, buffers that it binds anew, updates that fail on one rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks

SAMPLES = 48
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, 1).double()
        self.register_buffer("temperature", torch.tensor(1.0))
        self.register_buffer("updates", torch.zeros(1))
        self.register_buffer("cache", torch.ones(2))

    def forward(self, x):
        if self.cache.numel() < len(x):
            self.cache = torch.ones(len(x))  # as a rotary embedding's
        return self.linear(x) * self.temperature * self.cache[: len(x), None]


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, X[index], Y[index]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def training(sampler=None, make=torch.optim.SGD):
    net = Net()
    model = shoal.nn.DistributedDataParallel(net)
    optimizer = make(net.parameters(), lr=0.01)
    given = (model, optimizer) if sampler is None else (model, optimizer, sampler)
    return net, model, optimizer, shoal.Elastic(*given, on_change=lambda change: None)


def loss_of(prediction, target):
    return (prediction - target).square().mean()


def dying_in_step_2(rank, model, elastic):
    """A first function of step(), in which rank 1 ends after its forward."""

    def compute():
        loss = loss_of(model(X), Y)
        if rank == 1 and elastic.steps == 2:
            die()
        loss.backward()

    return compute


def survivors(run, victims, ranks=3):
    outcomes = Ranks(run, ranks).outcomes(timeout=60)
    for rank, outcome in enumerate(outcomes):
        assert outcome[0] == (rank not in victims), outcome
    return [outcome[1] for outcome in outcomes if outcome[0]]


def test_ELA02_a_buffer_that_was_bound_anew_between_steps_survives_a_death():
    def run(rank):
        net, model, optimizer, elastic = training()

        compute = dying_in_step_2(rank, model, elastic)
        changed = False
        while elastic.steps < 4:
            if elastic.steps == 2 and not changed:
                changed = True
                net.temperature = torch.tensor(0.5)
            elastic.step(1, compute, optimizer.step)
            optimizer.zero_grad()
        return net.temperature.item()

    assert survivors(run, {1}) == [0.5, 0.5]


def test_ELA02_a_buffer_that_update_binds_anew_counts_complete_steps():
    def run(rank):
        net, model, optimizer, elastic = training()

        compute = dying_in_step_2(rank, model, elastic)

        def update():
            optimizer.step()
            net.updates = net.updates + 1

        log = []
        while elastic.steps < 5:
            elastic.step(1, compute, update)
            optimizer.zero_grad()
            log.append((elastic.steps, net.updates.item()))
        return log

    for log in survivors(run, {1}):
        assert all(steps == updates for steps, updates in log), log


def test_ELA01_a_buffer_that_grows_in_the_step_in_which_a_rank_dies_is_named():
    def run(rank):
        net, model, optimizer, elastic = training()

        def compute():
            loss = loss_of(model(X[: 2 + elastic.steps]), Y[: 2 + elastic.steps])
            if rank == 1 and elastic.steps == 2:
                die()
            loss.backward()

        with pytest.raises(shoal.UsageError, match=r"buffer cache was \[3\] of Float .* and is \[4\]"):
            while elastic.steps < 4:
                elastic.step(1, compute, optimizer.step)
                optimizer.zero_grad()
        return elastic.steps

    assert survivors(run, {1}) == [2, 2]


@pytest.mark.parametrize("by", ["an error on all ranks", "abandon_step"])
def test_ELA05_a_batch_that_all_ranks_skip_makes_no_sample_come_twice(by, tmp_path):
    def run(rank):
        sampler = shoal.data.DistributedSampler(Numbered(), seed=1)
        _, model, optimizer, elastic = training(sampler)
        batches = 0
        sampler.set_epoch(0)
        with open(tmp_path / f"{rank}", "w") as trained:
            while elastic.in_epoch():
                for indices, x, y in torch.utils.data.DataLoader(Numbered(), batch_size=2, sampler=sampler):
                    batches += 1

                    def compute():
                        prediction = model(x)
                        if batches == 2 and by == "an error on all ranks":
                            raise ValueError("a bad batch")
                        if batches == 2 and rank == 1:
                            model.abandon_step()
                            raise ValueError("a bad batch")
                        if rank == 2 and batches == 5:
                            die()
                        loss_of(prediction, y).backward()

                    try:
                        if not elastic.step(len(x), compute, optimizer.step):
                            break
                        trained.write("".join(f"{index}\n" for index in indices.tolist()))
                        trained.flush()
                    except (ValueError, shoal.StepAbandoned):
                        pass
                    optimizer.zero_grad()
        return elastic.steps

    survivors(run, {2})
    trained = [int(line) for rank in range(3) for line in open(tmp_path / f"{rank}")]
    assert len(trained) == len(set(trained)) == SAMPLES - 3 * 2


def test_ELA02_what_changes_after_a_step_that_was_left_is_not_undone():
    def run(rank):
        net, model, optimizer, elastic = training()

        def bad():
            raise ValueError("a bad batch, on all ranks")

        with pytest.raises(ValueError):
            elastic.step(1, bad, optimizer.step)
        net.temperature.fill_(0.5)
        torch.manual_seed(99)

        def evaluate():
            if rank == 1:
                die()
            dist.all_reduce(torch.ones(1))

        elastic.together(evaluate)
        return net.temperature.item(), torch.initial_seed()

    assert survivors(run, {1}) == [(0.5, 99), (0.5, 99)]


def test_ELA02_a_rank_whose_update_fails_leaves_the_job_whatever_the_error():
    def run(rank):
        net, model, optimizer, elastic = training()

        def compute():
            loss_of(model(X), Y).backward()

        def update():
            optimizer.step()
            if rank == 1 and elastic.steps == 1:
                elastic.recover()  # refused within a step

        errors = []
        while elastic.steps < 4 and len(errors) < 2:
            try:
                elastic.step(1, compute, update)
            except shoal.UsageError as error:
                errors.append(str(error))
            optimizer.zero_grad()
        return errors, elastic.steps, net.linear.weight.tolist()

    first, failed, last = survivors(run, set())
    assert first == last
    assert first[:2] == ([], 4)
    assert "recover() is called within step()" in failed[0][0]
    assert "it has left the job" in failed[0][1]


class Counting(torch.optim.SGD):
    """A warm-up whose count is no parameter's."""

    def step(self, closure=None):
        count = self.state["all"]
        count["steps"] = count.get("steps", 0) + 1
        return super().step(closure)


def test_ELA02_state_that_is_no_parameters_is_refused_in_a_sharded_update():
    def run(rank):
        def sharded(parameters, lr):
            return shoal.optim.OSS(parameters, Counting, lr=lr)

        _, model, optimizer, elastic = training(make=sharded)

        def compute():
            loss_of(model(X), Y).backward()

        with pytest.raises(shoal.UsageError, match="keeps state under 'all', which is no parameter"):
            elastic.step(1, compute, optimizer.step)
        time.sleep(0.2)
        return True

    assert survivors(run, set(), ranks=2) == [True, True]


def test_ELA01_averages_may_take_the_place_of_parameters_in_an_evaluation():
    def run(rank):
        net, model, optimizer, elastic = training()

        def compute():
            loss_of(model(X), Y).backward()

        elastic.step(1, compute, optimizer.step)
        optimizer.zero_grad()
        own, averages = net.linear.weight, torch.nn.Parameter(torch.zeros(1, 6, dtype=torch.float64))

        def evaluate():
            return net(X).sum().item()

        net.linear.weight = averages
        seen = elastic.together(evaluate)
        net.linear.weight = own
        elastic.step(1, compute, optimizer.step)
        return seen, elastic.steps

    first, second = survivors(run, set(), ranks=2)
    assert first == second
    assert first[1] == 2


def passes(rank, train, loader_once=False):
    """Three epochs of 48 samples on two ranks, of which rank 1 ends in the second one if `train` does so; complete steps."""
    sampler = shoal.data.DistributedSampler(Numbered(), shuffle=False)
    _, model, optimizer, elastic = training(sampler)
    loader = torch.utils.data.DataLoader(Numbered(), batch_size=4, sampler=sampler)

    def batches():
        for _, x, y in loader if loader_once else torch.utils.data.DataLoader(Numbered(), batch_size=4, sampler=sampler):

            def compute(x=x, y=y):
                if rank == 1 and elastic.steps == 8 and train is not skip:
                    die()
                loss_of(model(x), y).backward()

            complete = elastic.step(len(x), compute, optimizer.step)
            optimizer.zero_grad()
            yield complete

    train(rank, sampler, elastic, batches)
    return elastic.steps


def name_within(rank, sampler, elastic, batches):
    for epoch in range(elastic.first_epoch, 3):
        while elastic.in_epoch():
            sampler.set_epoch(epoch)
            all(batches())


def name_nothing(rank, sampler, elastic, batches):
    for _ in range(elastic.first_epoch, 3):
        while elastic.in_epoch():
            all(batches())


def skip(rank, sampler, elastic, batches):
    for epoch in range(2):
        sampler.set_epoch(epoch)
        while elastic.in_epoch():
            for i, complete in enumerate(batches()):
                if not complete or (rank == 1 and epoch == 0 and i == 4):
                    break


def never_ask(rank, sampler, elastic, batches):
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(batches())


# Six steps, two of eight samples and eight of four, and twelve.
@pytest.mark.parametrize("train", [name_within, name_nothing])
@pytest.mark.parametrize("loader_once", [False, True])
def test_ELA05_each_pass_takes_each_sample_once_whatever_names_epochs(train, loader_once):
    assert survivors(lambda rank: passes(rank, train, loader_once), {1}, ranks=2) == [28]


@pytest.mark.parametrize(
    ("train", "text", "victims"),
    [(skip, "ranks are in passes 1 to 2 through their samples", ()), (never_ask, "never calls in_epoch()", (1,))],
)
def test_ELA05_ranks_in_different_passes_and_loops_without_passes_are_refused(train, text, victims):
    def run(rank):
        with pytest.raises(shoal.UsageError) as error:
            passes(rank, train)
        return str(error.value)

    for said in survivors(run, victims, ranks=2):
        assert text in said
