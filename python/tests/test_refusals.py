"""Programs that an optimizer of one process takes and that would be wrong on shards: right, or one sentence says why not."""

import pytest
import torch
import torch._dynamo  # which a rank's first optimizer would import
import torch.distributed as dist

import shoal
from ranks import errors_on_ranks, on_ranks

MOMENTUM = {"lr": 0.05, "momentum": 0.9}


class TwoParts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a = torch.nn.Linear(6, 6).double()
        self.b = torch.nn.Linear(6, 3).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen = 0.5 * self.seen + 1  # another tensor than before
        return self.b(torch.tanh(self.a(x)))


def batch(step, rank):
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net, step, rank):
    return net(batch(step, rank)).pow(2).mean()


def zero1(net, groups, kind=torch.optim.SGD, **options):
    optimizer = shoal.optim.OSS(groups, kind, **options)
    return shoal.nn.DistributedDataParallel(net, find_unused_parameters=True), optimizer


def zero2(net, groups, kind=torch.optim.SGD, **options):
    optimizer = shoal.optim.OSS(groups, kind, **options)
    return shoal.nn.ShardedDataParallel(net, optimizer), optimizer


def megatron(net, groups, kind=torch.optim.SGD, **options):
    return net, shoal.optim.DistributedOptimizer(net, kind, params=groups, **options)


def fsdp(net, groups, kind=torch.optim.SGD, **options):
    model = shoal.nn.FullyShardedDataParallel(net)
    return model, shoal.optim.FullyShardedOptimizer(model, kind, groups, **options)


ALL = [zero1, zero2, megatron, fsdp]


def in_one_process(groups_of, change=None, steps=4, **options):
    net = TwoParts()
    optimizer = torch.optim.SGD(groups_of(net), **options)
    for step in range(steps):
        if change and step == 2:
            change(net)
        optimizer.zero_grad()
        (sum(loss_of(net, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    return net


def assert_same(net, expected):
    for (name, one), (_, other) in zip(net.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=1e-12, msg=f"{name} differs")


@pytest.mark.parametrize("wrap", [zero1, zero2])
def test_PY06_momentum_is_kept_when_parameters_are_unfrozen(wrap):
    def change(net):
        for parameter in net.a.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def run(rank):
        net = TwoParts()
        change(net)
        model, optimizer = wrap(net, list(net.parameters()), **MOMENTUM)
        for step in range(6):
            if step in (2, 4):
                change(net)
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        expected = TwoParts()
        change(expected)
        alone = torch.optim.SGD(expected.parameters(), **MOMENTUM)
        for step in range(6):
            if step in (2, 4):
                change(expected)
            alone.zero_grad()
            (sum(loss_of(expected, step, other) for other in range(2)) / 2).backward()
            alone.step()
        assert_same(net, expected)

    on_ranks(run)


def test_PY06_an_option_of_one_group_that_is_false_stays_false():
    def groups(net):
        return [{"params": list(net.a.parameters())}, {"params": list(net.b.parameters()), "maximize": False}]

    def run(rank):
        expected = in_one_process(groups, lr=0.1, maximize=True)
        for wrap in ALL:
            net = TwoParts()
            model, optimizer = wrap(net, groups(net), lr=0.1, maximize=True)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step, rank).backward()
                optimizer.step()
            assert_same(net, expected)

    on_ranks(run)


def test_PY07_buffers_that_forward_replaces_are_saved_and_loaded(tmp_path):
    def run(rank):
        net = TwoParts()
        model, optimizer = fsdp(net, None, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        assert model.state_dict()["seen"] == net.seen == 1.75
        assert model.full_state_dict()["seen"] == 1.75
        training = shoal.checkpoint.TrainingState(model, optimizer)
        shoal.checkpoint.save(tmp_path, training, step=3)
        loss_of(model, 3, rank).backward()
        optimizer.step()
        assert net.seen != 1.75
        shoal.checkpoint.load_latest(tmp_path, training)
        assert net.seen == 1.75

    on_ranks(run)


def refused(run, *words):
    for error in errors_on_ranks(run):
        assert error is not None and all(word in error for word in words), error


def test_PY06_parameters_in_a_set_are_refused():
    refused(lambda rank: zero1(TwoParts(), [{"params": set(TwoParts().parameters())}], lr=0.1), "TypeError", "in a set")


def test_PY06_an_optimizer_that_changes_its_own_options_is_refused():
    class Counts(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            for group in self.param_groups:
                group["k"] = 0

        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] += 1
            return super().step(closure)

    def run(rank):
        net = TwoParts()
        zero1(net, list(net.parameters()), Counts, lr=0.1)

    refused(run, "UsageError", "Counts keeps k in its param group")


def test_PY07_state_of_lists_is_refused_by_the_optimizers_name(tmp_path):
    class Remembers(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = [1.0]
            return super().step(closure)

    def refuses(rank):
        net = TwoParts()
        model = shoal.nn.DistributedDataParallel(net)
        lists = torch.optim.LBFGS(net.parameters())
        with pytest.raises(shoal.UsageError, match=r"TrainingState: L-BFGS keeps lists.*save_module\(\)"):
            shoal.checkpoint.TrainingState(model, lists)
        optimizer = Remembers(net.parameters(), lr=0.1)
        training = shoal.checkpoint.TrainingState(model, optimizer)
        model(batch(0, rank)).sum().backward()
        optimizer.step()
        with pytest.raises(shoal.UsageError, match=r"state seen of the optimizer .*Remembers is a list.*save_module\(\)"):
            shoal.checkpoint.save(tmp_path / "run", training)

    on_ranks(refuses)


def test_PY06_state_that_is_spread_is_not_read_or_set():
    def run(rank):
        net = TwoParts()
        _, optimizer = zero1(net, list(net.parameters()), **MOMENTUM)
        with pytest.raises(shoal.UsageError, match="load_state_dict"):
            optimizer.state = {}
        with pytest.raises(shoal.UsageError, match="spread over the ranks"):
            optimizer.state[net.a.weight]

    on_ranks(run)


def test_PY06_a_scaler_without_scale_loss_is_refused():
    def run(rank):
        model, optimizer = fsdp(TwoParts().half(), None, lr=0.1, scaler={"initial_scale": 1024.0})
        model(batch(0, rank).half()).pow(2).mean().backward()
        optimizer.step()

    refused(run, "UsageError", "scale_loss(loss).backward()")


def test_PY06_a_second_optimizer_of_the_gradient_buffers_is_refused():
    def run(rank):
        net = TwoParts()
        first = shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
        with pytest.raises(shoal.UsageError, match="still in use"):
            shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.01)
        del first
        shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.01)

    on_ranks(run)


def test_PY06_a_grad_scaler_on_local_updates_is_refused():
    def run(rank):
        net = TwoParts()
        optimizer = shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(net, 0, rank)).backward()
        scaler.step(optimizer)

    refused(run, "UsageError", "every rank must call step() equally often")


def test_PY05_other_arguments_in_place_of_a_process_group_or_of_parameters_are_named():
    def run(rank):
        net = TwoParts()
        model = shoal.nn.FullyShardedDataParallel(TwoParts())
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        for kind, act in {
            "list": lambda: shoal.nn.DistributedDataParallel(net, [0]),
            "int": lambda: shoal.nn.DistributedDataParallel(net, 0),
            "int; .*options such as lr and every": lambda: shoal.optim.LocalUpdates(net, inner, 500),
            "float": lambda: shoal.optim.OSS(net.parameters(), torch.optim.SGD, 0.1),
        }.items():
            with pytest.raises(shoal.UsageError, match=f"process_group is a {kind}"):
                act()
        with pytest.raises(shoal.UsageError, match="this rank is not a member"):
            shoal.nn.DistributedDataParallel(net, dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(shoal.UsageError, match="0.1 stands where the parameters go.*by name, lr=0.1"):
            shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, 0.1)

    on_ranks(run)


def test_PY06_an_optimizer_that_needs_its_closure_is_refused_by_local_updates():
    class Needs(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    def run(rank):
        for kind in (torch.optim.LBFGS, Needs):
            net = TwoParts()
            with pytest.raises(shoal.UsageError, match=rf"LocalUpdates: step\(\) of {kind.__name__} needs a closure"):
                shoal.optim.LocalUpdates(net, kind(net.parameters(), lr=0.1), every=2)

    on_ranks(run)


def test_PY06_modules_on_the_meta_device_are_refused_in_words_of_python():
    def run(rank):
        with torch.device("meta"):
            net = torch.nn.Linear(4, 2)
        text = r'parameter %s is on the meta device.*in Python on the CPU, or call to_empty\(device="cpu"\) and initialise it'
        for wrap in (shoal.nn.DistributedDataParallel, shoal.nn.FullyShardedDataParallel):
            with pytest.raises(shoal.UsageError, match=text % "weight"):
                wrap(net)
        with pytest.raises(shoal.UsageError, match=text % r"0 \[2, 4\]"):
            shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        net.to_empty(device="cpu").reset_parameters()
        shoal.nn.DistributedDataParallel(net)
        shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)

    on_ranks(run)


def test_PY06_an_expanded_parameter_is_refused_before_anything_is_sent():
    def run(rank):
        row = torch.ones(1, 4)
        with pytest.raises(shoal.UsageError, match=r"OSS: parameter 0 \[16, 4\] has several elements in one place of memory"):
            shoal.optim.OSS([torch.nn.Parameter(row.expand(16, 4))], torch.optim.SGD, lr=0.1)
        shoal.optim.OSS([torch.nn.Parameter(row)], torch.optim.SGD, lr=0.1)

    on_ranks(run)


def test_PY06_a_module_in_pytorchs_ddp_is_refused_where_its_gradients_are_used_up():
    def decentralized(net, groups, kind, **options):
        shoal.nn.DecentralizedDataParallel(net, kind, topology="complete", **options)

    def run(rank):
        for wrap in (zero2, megatron, fsdp, decentralized):
            inside = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
            for net, name in ((inside, "the module"), (torch.nn.Sequential(inside), "0")):
                text = f"{name} is PyTorch's DistributedDataParallel.*give the module in it, model.module"
                with pytest.raises(shoal.UsageError, match=text):
                    wrap(net, list(net.parameters()), torch.optim.SGD, lr=0.1)
            net = inside.module
            wrap(net, list(net.parameters()), torch.optim.SGD, lr=0.1)

    on_ranks(run)


def test_PY06_a_part_in_pytorchs_ddp_that_the_wrapper_does_not_train_may_stay():
    def net_of(trained):
        net = torch.nn.Sequential(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2)), torch.nn.Linear(2, 2))
        net[0].requires_grad_(trained)
        return net

    def run(rank):
        sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.1}
        for trained in (False, True):
            net = net_of(trained)
            ignored = [name for name, _ in net[0].named_parameters(prefix="0")]
            model = shoal.nn.FullyShardedDataParallel(net, ignored_modules=["0"])
            model(torch.ones(3, 4)).sum().backward()
            net = net_of(trained)
            shoal.optim.DistributedOptimizer(net, **sgd, ignored=ignored)
            net(torch.ones(3, 4)).sum().backward()
            model = shoal.nn.DecentralizedDataParallel(net_of(trained), **sgd, topology="complete", ignored=ignored)
            model(torch.ones(3, 4)).sum().backward()
            net = net_of(trained)
            shoal.nn.ShardedDataParallel(net, shoal.optim.OSS(net[1].parameters(), **sgd), ignored=ignored)
        for wrap in (shoal.nn.FullyShardedDataParallel, lambda net: shoal.optim.DistributedOptimizer(net, **sgd)):
            wrap(net_of(trained=False))

    on_ranks(run)


@pytest.mark.parametrize("inside", [False, True])
def test_PY06_pytorchs_ddp_around_a_wrapper_is_refused_because_both_reduce(inside):
    def decentralized(net, groups, kind, **options):
        return shoal.nn.DecentralizedDataParallel(net, kind, topology="complete", **options), None

    def run(rank):
        for wrap in (zero1, zero2, fsdp, decentralized, megatron):
            net = TwoParts()
            model, _ = wrap(net, list(net.parameters()), torch.optim.SGD, lr=0.1)
            around = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(model) if inside else model)
            with torch.no_grad():
                around(batch(0, rank))  # reduces nothing
            text = "Parallel: PyTorch's DistributedDataParallel is around this model and would reduce its gradients a second time"
            if wrap is megatron:
                text = "reduced to shards on the ranks.*put no DistributedDataParallel around the module"
            with pytest.raises(shoal.UsageError, match=text):
                loss_of(around, 0, rank).backward()

    on_ranks(run)


def test_PY05_wrappers_and_functions_in_place_of_a_module_are_named(tmp_path):
    def run(rank):
        model = shoal.nn.DistributedDataParallel(TwoParts())
        for act in (
            shoal.nn.DistributedDataParallel,
            lambda one: zero2(one, list(one.parameters()), lr=0.1),
            lambda one: shoal.checkpoint.save_module(tmp_path / "model.pt", one),
            lambda one: shoal.checkpoint.load_module(tmp_path / "model.pt", one),
        ):
            with pytest.raises(shoal.UsageError, match="give the module in the DistributedDataParallel, model.module, not"):
                act(model)
        with pytest.raises(shoal.UsageError, match="give a torch.nn.Module, not a function"):
            shoal.nn.DistributedDataParallel(lambda x: x)

    on_ranks(run)
