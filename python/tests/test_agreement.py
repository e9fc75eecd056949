"""What one rank does otherwise than the others: an error on every rank that names it, in every strategy."""

import copy
import pickle

import numpy
import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, each_strategy, train_alone
from ranks import errors_on_ranks, on_ranks
from test_wrappers import RATES, STRATEGIES, losses_of


OWN = {strategy: wrap for strategy, wrap in STRATEGIES.items() if strategy != "ddp"}  # with an optimizer of shoal


def errors(wrap, act):
    def on_rank(rank):
        model, optimizer = wrap(models.make("gpt"), None, None)
        losses_of(model, optimizer, "gpt", steps=1)
        act(rank, model, optimizer)
        losses_of(model, optimizer, "gpt", steps=2)

    return errors_on_ranks(on_rank, timeout=30)


@pytest.mark.parametrize("strategy", OWN)
def test_PY06_options_that_differ_between_ranks_are_named(strategy):
    def act(rank, model, optimizer):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for loss in (1.0, 2.0 if rank == 1 else 0.5):
            schedule.step(loss)

    for error in errors(OWN[strategy], act):
        assert "DisagreeError" in error, error
        assert "rank 0 has param group 0: lr 0.003, rank 1 has param group 0: lr 0.0015; set the same" in error, error


def test_PY06_options_that_differ_are_named_with_local_updates():
    def on_rank(rank):
        net = models.make("gpt")
        optimizer = shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2)
        losses_of(net, optimizer, "gpt", steps=2)
        optimizer.param_groups[0]["momentum"] = 0.5 * rank
        losses_of(net, optimizer, "gpt", steps=2)

    for error in errors_on_ranks(on_rank):
        assert "DisagreeError: LocalUpdates: " in error and "momentum 0, rank 1 has param group 0: momentum 0.5" in error, error


@pytest.mark.parametrize("strategy", OWN)
def test_PY06_a_step_that_raises_on_one_rank_ends_on_all(strategy):
    class Breaks(torch.optim.AdamW):
        def step(self, closure=None):
            if dist.get_rank() == 1 and any(state["step"] == 1 for state in self.state.values()):
                raise ValueError("no more")
            return super().step(closure)

    def on_rank(rank):
        net = models.make("gpt")
        if strategy == "megatron":
            model, optimizer = net, shoal.optim.DistributedOptimizer(net, Breaks, **RATES)
        elif strategy == "fsdp":
            model = shoal.nn.FullyShardedDataParallel(net, shard_by_parameter=True)
            optimizer = shoal.optim.FullyShardedOptimizer(model, Breaks, **RATES)
        else:
            optimizer = shoal.optim.OSS(net.parameters(), Breaks, **RATES)
            model = shoal.nn.DistributedDataParallel(net) if strategy == "zero1" else shoal.nn.ShardedDataParallel(net, optimizer)
        losses_of(model, optimizer, "gpt", steps=1)
        with pytest.raises((ValueError, shoal.StepAbandoned)) as raised:
            losses_of(model, optimizer, "gpt", steps=1)
        parameters = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        first = parameters.clone()
        dist.broadcast(first, 0)
        assert torch.equal(parameters, first)
        return f"{raised.type.__name__}: {raised.value}"

    first, second = on_ranks(on_rank, timeout=30)
    assert "StepAbandoned" in first and "the optimizer of rank 1 has failed in its step(): ValueError: no more" in first
    assert second == "ValueError: no more"


@pytest.mark.parametrize("strategy", OWN)
def test_PY06_state_that_differs_or_is_loaded_on_one_rank_is_named(strategy):
    def differs(rank, model, optimizer):
        state = optimizer.state_dict()
        if rank == 1:
            state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] * 2
        optimizer.load_state_dict(state)

    for error in errors(OWN[strategy], differs):
        assert "DisagreeError" in error and "rank 1 has exp_avg of parameter 0" in error, error

    def alone(rank, model, optimizer):
        state = optimizer.state_dict()
        if rank == 1:
            optimizer.load_state_dict(state)

    assert all("DisagreeError" in error and "load_state_dict()" in error for error in errors(OWN[strategy], alone))


def test_PY07_a_model_that_differs_or_is_loaded_on_one_rank_is_named():
    def differs(rank, model, optimizer):
        state = {name: value + rank for name, value in model.state_dict().items()}
        model.load_state_dict(state)

    for error in errors(STRATEGIES["ddp"], differs):
        assert "DisagreeError" in error and "rank 1 has tokens.weight with digest" in error, error

    def alone(rank, model, optimizer):
        if rank == 1:
            model.module.load_state_dict(models.make("gpt").state_dict())

    for error in errors(STRATEGIES["ddp"], alone):
        assert "DisagreeError" in error and "loaded or written, or gradients by hand; elsewhere not" in error, error

    def same(rank, model, optimizer):
        net = copy.deepcopy(model.module)
        pickle.loads(pickle.dumps(net)).load_state_dict(model.module.state_dict())
        model.load_state_dict(model.state_dict())

    assert errors(STRATEGIES["ddp"], same) == [None, None]


# As in programs that initialise a model after it was wrapped, by functions of PyTorch's older examples.
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_PY07_values_of_each_rank_by_the_data_of_parameters_are_named(strategy):
    def initialise(module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(0.0, 0.02)

    def on_rank(rank):
        for seed in (5, rank):
            model, optimizer = STRATEGIES[strategy](models.make("lstm"), None, None)
            torch.manual_seed(seed)
            model.apply(initialise)
            losses_of(model, optimizer, "lstm", steps=1)
            del model, optimizer

    for error in errors_on_ranks(on_rank):
        assert "DisagreeError: " in error and "ranks disagree at item " in error, error


# Where one rank's writes leave what it had, it cannot know of the others': nothing of its own is to be compared.
def test_PY07_values_of_each_rank_that_rank_0_had_before_are_an_error_on_all():
    def on_rank(rank):
        said = []
        for strategy, wrap in STRATEGIES.items():
            torch.manual_seed(rank)
            net = torch.nn.Linear(3, 3)
            model, optimizer = wrap(net, dist.new_group([0, 1]), None)
            torch.manual_seed(rank)
            net.reset_parameters()
            try:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            except shoal.Error as error:
                said.append(f"{strategy}: {type(error).__name__}: {error}")
            dist.barrier()
        return said

    for transport in ("host", "tcp"):
        options = {"pg_options": shoal.distributed.Options(transport=transport)}
        for said in on_ranks(on_rank, init=options, timeout=30):
            assert len(said) == len(STRATEGIES), said
            for one in said:
                named = "; elsewhere not, or as they were" in one or "ranks disagree at item 0: rank 0 has parameter" in one
                assert ": DisagreeError: " in one and "loaded or written" in one and named, one


class WithBank(torch.nn.Module):
    """Keeps what this rank has seen in a parameter that is not trained."""

    def __init__(self, replaces):
        super().__init__()
        self.replaces = replaces
        self.linear = torch.nn.Linear(3, 2)
        self.bank = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            if self.replaces:
                self.bank.data = y[0].clone()
            else:
                self.bank.copy_(y[0])
        return y + self.bank


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replaces", [True, False])
def test_PY07_a_frozen_parameter_that_each_rank_writes_is_named_with_the_option_that_leaves_it_alone(strategy, replaces):
    option = "ignored_parameters" if strategy == "fsdp" else "ignored"

    def wrap(net, **options):
        params = [one for one in net.parameters() if one.requires_grad]
        if strategy == "fsdp":
            model = shoal.nn.FullyShardedDataParallel(net, **options)
            return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        if strategy == "megatron":
            return net, shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1, **options)
        if strategy == "ddp":
            return shoal.nn.DistributedDataParallel(net, **options), torch.optim.SGD(params, lr=0.1)
        optimizer = shoal.optim.OSS(params, torch.optim.SGD, lr=0.1)
        if strategy == "zero1":
            return shoal.nn.DistributedDataParallel(net, **options), optimizer
        return shoal.nn.ShardedDataParallel(net, optimizer, **options), optimizer

    def trains(rank, **options):
        model, optimizer = wrap(WithBank(replaces), **options)
        for _ in range(3):
            # Two forwards: DistributedDataParallel takes writes between two steps for the optimizer's.
            sum(model(torch.randn(2, 3) + rank) for _ in range(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def on_rank(rank):
        torch.manual_seed(rank)
        trains(rank, **{option: ["bank"]})
        try:
            trains(rank)
        except shoal.DisagreeError as error:
            return str(error)

    for error in on_ranks(on_rank):
        if error is None:
            assert strategy in {"zero2", "megatron"} and not replaces
        else:
            assert "bank (frozen: if each rank writes its own values, name it in ignored" in error, error


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data.sign() * 0.5
        return self.linear(x)


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_PY07_a_forward_that_replaces_memory_may_run_in_more_micro_batches_on_some_ranks(strategy, forwards):
    def trains(rank):
        net = Normalised()
        model, optimizer = STRATEGIES[strategy](net, None, None)
        for step in range(4):
            micros = 1 + (step + rank) % 3
            for micro in range(micros):
                with model.no_sync(micro + 1 < micros):
                    outputs = [model(torch.ones(1, 4) + micro + number) for number in range(forwards)]
                    (sum(outputs).square().mean() / micros).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.tolist() for one in model.state_dict().values()]

    first, second = on_ranks(trains)
    assert first == second


def test_PY06_rates_are_tensors_or_numbers_of_numpy():
    def trains(strategy, wrap):
        for rate in (torch.tensor(3e-3, dtype=torch.float64), numpy.float64(3e-3), numpy.float32(3e-3), numpy.array(3e-3)):
            model, optimizer = wrap(models.make("gpt"))
            one = models.make("gpt")
            alone = torch.optim.AdamW(one.parameters(), **RATES)
            for group in (optimizer.param_groups[0], alone.param_groups[0]):
                group["lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
            schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, alone)]
            for _ in range(2):
                assert_close(losses_of(model, optimizer, "gpt", steps=1), train_alone(one, alone, steps=1))
                for schedule in schedules:
                    schedule.step()
            assert type(optimizer.param_groups[0]["lr"]) is type(alone.param_groups[0]["lr"])
            assert float(optimizer.param_groups[0]["lr"]) == float(alone.param_groups[0]["lr"])

    each_strategy(trains)


def test_PY05_param_groups_of_a_decentralised_model_are_fixed():
    def refuses(rank):
        net = models.make("gpt")
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, lr=0.1)
        with pytest.raises(shoal.UsageError, match="construct it again with all param groups"):
            model.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        assert len(model.optimizer.param_groups) == 1

    on_ranks(refuses)


def test_PY05_gradients_of_parameters_in_no_wrapped_module_are_compared_by_oss():
    def trains(rank):
        for shards_gradients in (False, True):
            for averages in (False, True):
                torch.manual_seed(0)
                net, temperature = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(()))
                optimizer = shoal.optim.OSS([*net.parameters(), temperature], torch.optim.SGD, lr=0.1)
                if shards_gradients:
                    model = shoal.nn.ShardedDataParallel(net, optimizer)
                else:
                    model = shoal.nn.DistributedDataParallel(net)
                (model(torch.full((1, 3), rank + 1.0)) * temperature.exp()).sum().backward()
                if averages:
                    dist.all_reduce(temperature.grad, dist.ReduceOp.AVG)
                    optimizer.step()
                    assert temperature.item() != 1
                else:
                    with pytest.raises(shoal.DisagreeError, match="make each a part of the module.*the gradient of parameter 2"):
                        optimizer.step()
                dist.barrier()

    on_ranks(trains)


class Masked(torch.nn.Module):
    """A module that makes its mask when it first needs one."""

    def __init__(self, persistent):
        super().__init__()
        torch.manual_seed(1)
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("mask", None, persistent=persistent)

    def forward(self, x):
        if self.mask is None or self.mask.shape[0] < len(x):
            self.register_buffer("mask", torch.ones(len(x), 1), persistent="mask" not in self._non_persistent_buffers_set)
        return self.fc(x) * self.mask[: len(x)]


def test_PY05_an_optimizer_that_differs_under_decentralised_training_is_named():
    def differs(rank):
        shoal.nn.DecentralizedDataParallel(models.make("gpt"), torch.optim.AdamW, lr=1e-3 * (rank + 1))

    for error in errors_on_ranks(differs):
        assert "DisagreeError" in error and "the optimizer of DecentralizedDataParallel" in error, error
        assert "lr 0.001" in error and "lr 0.002" in error, error

    def groups(rank):
        net = models.make("gpt")
        named = [parameter for _, parameter in net.named_parameters()]
        shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, params=named[rank:] + named[:rank], lr=0.1)

    for error in errors_on_ranks(groups):
        assert "DisagreeError" in error and "param group 0: tokens.weight" in error, error

    def topologies(rank):
        topology = "ring" if rank else "complete"
        shoal.nn.DecentralizedDataParallel(models.make("gpt"), torch.optim.SGD, topology=topology, lr=0.1)

    for error in errors_on_ranks(topologies):
        assert "DisagreeError: topology: " in error, error


def test_PY05_a_buffer_that_was_none():
    def trains(strategy, wrap):
        for persistent in (False, True):
            model, optimizer = wrap(Masked(persistent))

            def step(size, model=model, optimizer=optimizer):
                model(torch.ones(size, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            if persistent:
                with pytest.raises(shoal.UsageError, match="the buffer mask was None when the module was wrapped"):
                    step(2)
                    step(2)
            else:
                for size in (2, 3, 3):
                    step(size)

    each_strategy(trains)
