"""What may change after wrapping: it works, or one sentence says why not."""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, each_strategy, train_alone
from ranks import on_ranks
from test_local_training import LOCAL
from test_wrappers import STRATEGIES, group_over, losses_of, mean_loss


def test_PY05_changes_of_the_module_and_copies_are_refused():
    def refuses(strategy, wrap):
        net = models.make("gpt")
        net.register_buffer("seen", torch.zeros(1))
        model, optimizer = wrap(net)
        losses_of(model, optimizer, "gpt", steps=1)
        for copies in (copy.deepcopy, pickle.dumps):
            for object in (model, optimizer):
                if isinstance(object, shoal.optim.ShardedOptimizer) or object is model is not net:
                    with pytest.raises(TypeError, match="cannot be (pickled|copied)"):
                        copies(object)
        net.extra = torch.nn.Linear(2, 2)
        with pytest.raises(shoal.UsageError, match="the module extra was added; construct the wrapper after"):
            losses_of(model, optimizer, "gpt", steps=1)
        del net.extra
        net.register_buffer("extra", torch.ones(1))
        with pytest.raises(shoal.UsageError, match="the buffer extra was added; register it in __init__, or in forward with pers"):
            losses_of(model, optimizer, "gpt", steps=1)
        del net.extra
        net.seen = None
        with pytest.raises(shoal.UsageError, match="the buffer seen was set to None; construct the wrapper after"):
            losses_of(model, optimizer, "gpt", steps=1)
        net.seen = torch.zeros(1)
        net.norm.weight = torch.nn.Parameter(torch.ones(16))
        with pytest.raises(shoal.UsageError, match="the parameter norm.weight was replaced by another object.*model.module"):
            losses_of(model, optimizer, "gpt", steps=1)
        net.norm = None  # nothing keeps the child; without a wrapper (Megatron) its forward is the first to see it
        with pytest.raises((shoal.UsageError, TypeError), match="the module norm was set to None; construct the wrapper|not callable"):
            losses_of(model, optimizer, "gpt", steps=1)

    each_strategy(refuses)


class Doubled(torch.nn.Module):
    def forward(self, value):
        return value * 2

    def right_inverse(self, value):
        return value / 2


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_FSDP07_a_module_whose_parametrizations_were_removed_is_unwrapped(transport):
    from torch.nn.utils import parametrizations, parametrize

    def make():
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        parametrizations.weight_norm(net[0])
        parametrizations.orthogonal(net[1])
        return net

    def remove(net):
        for layer in (net[0], net[1]):
            parametrize.remove_parametrizations(layer, "weight")
        return net

    def ends(rank):
        net = make()
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), auto_wrap_policy=torch.nn.Linear)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.0)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = make()(x)
        remove(net)
        assert model.unwrap() is net
        del model, optimizer
        gc.collect()
        torch.testing.assert_close(net(x), expected)
        assert list(net.state_dict()) == list(remove(make()).state_dict())
        net(x).sum().backward()
        assert net[0].weight.grad is not None
        # With param_dtype the new values are of rounded ones.
        for normed in (True, False):
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            if normed:
                parametrizations.weight_norm(net[0])
            else:
                parametrize.register_parametrization(net[0], "weight", Doubled())
            model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
            parametrize.remove_parametrizations(net[0], "weight")
            with pytest.raises(shoal.UsageError, match="in torch.bfloat16, .*: call unwrap[(][)] first"):
                model.unwrap()

    on_ranks(ends)


def test_PY05_frozen_parameters_and_other_dtypes():
    def trains(strategy, wrap):
        nets = [models.make("gpt"), models.make("gpt")]
        for net in nets:
            net.blocks[0].requires_grad_(False)
        model, optimizer = wrap(nets[0])
        assert_close(losses_of(model, optimizer, "gpt", steps=3), train_alone(nets[1], models.adamw(nets[1].parameters())))

        net = models.make("cnn")
        model, optimizer = wrap(net)
        model.double()

        def steps():
            for step in range(2):
                x, y = models.batch("cnn", step, dist.get_rank())
                models.loss_of(model(x.double()), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        if strategy in {"megatron", "fsdp"}:
            with pytest.raises(shoal.UsageError, match="Revert the change .module.to.dtype.., or wrap the module again"):
                steps()
            return
        steps()
        for name, tensor in net.state_dict().items():  # buffers differ: each rank's last batch has changed them
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, tensor) or "running" in name, name
        before = net.body[1].running_mean.clone()
        model(models.batch("cnn", 5, 0)[0].double())
        dist.broadcast(before, 0)
        after = net.body[1].running_mean.clone()
        dist.broadcast(after, 0)
        assert after.dtype == torch.float64 and torch.equal(after, net.body[1].running_mean)

    each_strategy(trains)


# Small buckets stay where they were made; of large ones only the owner's does, and the others are made anew in each step.
@pytest.mark.parametrize(("channels", "transport"), [(4, "host"), (4, "tcp"), (96, "host")])
def test_PY05_parameters_may_get_other_strides_after_wrapping(channels, transport):
    def make():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 16 * channels, 2), torch.nn.Tanh(), torch.nn.Conv2d(16 * channels, channels, 2), torch.nn.Flatten()
        )

    def batch(step, rank):
        return torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank))

    def alone():
        net = make()
        optimizer = models.adamw(net.parameters())
        losses = []
        for step in range(4):
            each = [net(batch(step, rank)).square().mean() for rank in range(2)]
            losses.append(sum(one.item() for one in each) / 2)
            (sum(each) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    expected = alone()

    def trains(strategy, wrap):
        for when in range(3):
            model, optimizer = wrap(make())
            losses = []
            for step in range(4):
                if step == when:
                    model.to(memory_format=torch.channels_last)
                loss = model(batch(step, dist.get_rank())).square().mean()
                losses.append(mean_loss(loss))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=when == 0)  # gradients of zeros are converted, too
            worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
            assert worst < 1e-5, (when, losses, expected)

    each_strategy(trains, transport)


def mapped_again(tensor):
    """The tensor as a process has it to which it was sent."""
    memory = torch.UntypedStorage._new_shared_fd_cpu(*tensor.untyped_storage()._share_fd_cpu_())
    return torch.empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_FSDP05_after_an_evaluation_with_averages_the_float32_copies_have_all_their_bits(transport):
    def evaluates(rank):
        net = models.make("gpt")
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=1e-3)
        parameters = dict(net.named_parameters())

        def copies(values):
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

        def replaces(values):
            for name, parameter in parameters.items():
                parameter.data = values[name]

        for swap in (copies, replaces):
            losses_of(model, optimizer, "gpt", steps=1)
            before = model.state_dict()
            with torch.no_grad():
                own = {name: parameter.clone() if swap is copies else parameter.data for name, parameter in parameters.items()}
                averages = {name: 1.1 * before[name] for name in own}
                swap(averages)
                model(models.batch("gpt", 0, rank)[0])
                with model.summon_full_params(writeback=False):
                    for name, parameter in parameters.items():
                        assert torch.equal(parameter, averages[name].to(torch.bfloat16)), name
                swap(own)
            for _ in range(2):
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name]), name
                with model.summon_full_params(writeback=False):
                    pass  # takes over what was put back

    on_ranks(evaluates)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY05_parameters_that_other_processes_get_are_trained_all_the_same(transport):
    def trains(rank):
        group = group_over(transport)
        for strategy, wrap in (STRATEGIES | LOCAL).items():
            in_pages = transport == "tcp" and strategy == "fsdp"
            losses = []
            for shares in (False, True):
                net = models.make("gpt")
                model, optimizer = wrap(net, group, None)
                losses.append(losses_of(model, optimizer, "gpt", steps=2))
                if shares and not in_pages:
                    net.share_memory()
                elif shares:
                    with model.summon_full_params(writeback=False):
                        net.share_memory()
                        sent = mapped_again(net.norm.weight)
                        assert torch.equal(sent, net.norm.weight)
                seen = None if in_pages or not shares else [mapped_again(one) for one in net.parameters()]
                losses[-1] += losses_of(model, optimizer, "gpt", steps=2)
                with torch.no_grad():
                    net.norm.weight.mul_(0.5)  # counts once
                losses[-1] += losses_of(model, optimizer, "gpt", steps=2)
                if seen:
                    for now, one in zip(seen, net.parameters(), strict=True):
                        assert one.is_shared() and torch.equal(now, one), strategy
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0, msg=f"{strategy} {losses}")

    on_ranks(trains)


def test_PY05_a_backward_through_a_graph_from_before_the_step_is_an_error_on_all_ranks():
    def stale(rank):
        for transport in ("host", "tcp"):
            group = group_over(transport)
            for strategy, wrap in (STRATEGIES | LOCAL).items():
                torch.manual_seed(1)
                nets = torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
                (generator, of_generator), (judge, of_judge) = (wrap(net, group, None) for net in nets)
                noise = torch.randn(2, 3)

                def judges(fake):
                    loss = judge(fake).sigmoid().log().mean()
                    loss.backward(retain_graph=True)
                    of_judge.step()
                    of_judge.zero_grad()
                    return loss

                for _ in range(2):  # as it should be
                    judges(generator(noise).detach())
                    (-judge(generator(noise)).sigmoid().log().mean()).backward()
                    of_generator.step()
                    for optimizer in (of_generator, of_judge):
                        optimizer.zero_grad()
                loss = judges(generator(noise).detach())
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                dist.barrier()

    on_ranks(stale)
