"""Loops that a user of PyTorch pastes, in odd orders: each does what it says, or one sentence says what to do."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from ranks import on_ranks
from test_wrappers import RATES, STRATEGIES, group_over, losses_of, mean_loss

SHARDED = {"zero2", "megatron", "fsdp"}  # strategies whose gradients lie on several ranks
PREFIXED = {"ddp", "zero1", "zero2"}  # wrappers whose state_dict has the prefix of PyTorch's DDP


def each_strategy(test, transport="host"):
    """Runs test(strategy, wrap) for all strategies on two ranks, all in the same processes."""

    def on_rank(rank):
        group = group_over(transport)
        for strategy, wrap in STRATEGIES.items():
            try:
                test(strategy, lambda net, wrap=wrap: wrap(net, group, None))
            except BaseException as error:
                raise AssertionError(f"{strategy}: {type(error).__name__}: {error}") from error
            dist.barrier()

    on_ranks(on_rank)


def train_alone(net, optimizer, steps=3, prepare=None, micros=1):
    """One process with the batches of two ranks."""
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(micros):
            for rank in range(2):
                x, y = models.batch("gpt", micros * step + micro, rank)
                loss = models.loss_of(net(x), y)
                (loss / 2 / micros).backward()
                total += loss.item() / 2
        if prepare:
            prepare()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def alone(steps=3):
    net = models.make("gpt")
    return train_alone(net, models.adamw(net.parameters()), steps), net


def named(strategy, state):
    return {f"module.{name}": value for name, value in state.items()} if strategy in PREFIXED else state


def backward(model, step):
    x, y = models.batch("gpt", step, dist.get_rank())
    loss = models.loss_of(model(x), y)
    loss.backward()
    return mean_loss(loss)


def assert_close(a, b):
    assert max(abs(one - other) for one, other in zip(a, b, strict=True)) < 1e-6, (a, b)


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY07_state_dict_is_whole_and_loads(transport):
    def saves(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        losses_of(model, optimizer, "gpt", steps=3)
        _, expected_net = alone()
        state, expected = model.state_dict(), named(strategy, expected_net.state_dict())
        assert list(state) == list(expected)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), name
        inside = model.module if hasattr(model, "module") else model
        for (name, parameter), one in zip(inside.named_parameters(), expected_net.parameters(), strict=True):
            assert (parameter.detach().numpy() == one.detach().numpy()).all(), name
        # Into a wrapper that exists.
        again, second = wrap(models.make("gpt"))
        again.load_state_dict(loaded)
        assert_close(losses_of(again, second, "gpt", steps=3), train_alone(expected_net, models.adamw(expected_net.parameters())))
        with pytest.raises(shoal.UsageError, match="assign=True|was replaced by another object"):
            again.load_state_dict({name: value.clone() for name, value in loaded.items()}, assign=True)
            losses_of(again, second, "gpt", steps=1)

    each_strategy(saves, transport)


def test_PY06_optimizer_state_has_the_format_of_torch_optim_both_ways():
    def exchanges(strategy, wrap):
        if strategy == "ddp":
            return
        model, optimizer = wrap(models.make("gpt"))
        losses_of(model, optimizer, "gpt", steps=3)
        net = models.make("gpt")
        one = models.adamw(net.parameters())
        train_alone(net, one)
        ours, theirs = optimizer.state_dict(), one.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, entry in theirs["state"].items():
            for key, value in entry.items():
                assert torch.equal(ours["state"][index][key], value), (index, key)
        fresh = models.make("gpt")
        fresh.load_state_dict(net.state_dict())
        model, optimizer = wrap(fresh)
        optimizer.load_state_dict(theirs)
        expected = train_alone(net, one, steps=2)
        assert_close(losses_of(model, optimizer, "gpt", steps=2), expected)

    each_strategy(exchanges)


def test_PY06_schedules_closures_and_ways_to_drop_gradients():
    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        inside = model.module if hasattr(model, "module") else model
        drop = [
            lambda: optimizer.zero_grad(set_to_none=False),
            model.zero_grad,
            lambda: inside.zero_grad(set_to_none=False),
            lambda: [setattr(parameter, "grad", None) for parameter in inside.parameters()],
            optimizer.zero_grad,
        ]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
        losses = []
        for step in range(5):
            losses.append(backward(model, step))
            optimizer.step()
            schedule.step()
            drop[step]()
        net = models.make("gpt")
        one = models.adamw(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(one, 1e-2, total_steps=6)
        expected = []
        for step in range(5):
            for rank in range(2):
                x, y = models.batch("gpt", step, rank)
                loss = models.loss_of(net(x), y)
                (loss / 2).backward()
                expected.append(loss.item() / 2)
            one.step()
            schedule.step()
            one.zero_grad()
        assert_close(losses, [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)])

        def closure():
            optimizer.zero_grad()
            x, y = models.batch("gpt", 0, dist.get_rank())
            loss = models.loss_of(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > optimizer.step(closure).item()

    each_strategy(trains)


def test_PY05_accumulation_with_no_sync_and_without():
    def trains(strategy, wrap):
        net = models.make("gpt")
        train_alone(net, models.adamw(net.parameters()), steps=2, micros=2)
        with torch.no_grad():
            expected = [mean_loss(models.loss_of(net(models.batch("gpt", 0, dist.get_rank())[0]), models.batch("gpt", 0, dist.get_rank())[1]))]
        for skip in (True, False):
            model, optimizer = wrap(models.make("gpt"))
            scope = model if hasattr(model, "no_sync") else optimizer
            for step in range(2):
                for micro in range(2):
                    with scope.no_sync(skip and micro == 0):
                        x, y = models.batch("gpt", 2 * step + micro, dist.get_rank())
                        (models.loss_of(model(x), y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_close([backward(model, 0)], expected)

    each_strategy(trains)


def test_PY05_clipping_is_right_or_names_the_call():
    def trains(strategy, wrap):
        net = models.make("gpt")
        expected = train_alone(
            net, models.adamw(net.parameters()), prepare=lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        )
        model, optimizer = wrap(models.make("gpt"))
        own = getattr(model, "clip_grad_norm_", None) or getattr(optimizer, "clip_grad_norm", None)
        losses = []
        for step in range(3):
            losses.append(backward(model, step))
            if strategy in SHARDED and step == 0:
                with pytest.raises(RuntimeError, match="clip with"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if own:
                own(0.1)
            elif strategy == "ddp":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if own or strategy == "ddp":
            assert_close(losses, expected)

    each_strategy(trains)


def test_PY06_torch_optim_on_sharded_parameters_and_torch_scalers():
    def trains(strategy, wrap):
        for scaled in (False, True):
            model, optimizer = wrap(models.make("gpt"))
            scaler = torch.amp.GradScaler("cpu", enabled=scaled)
            stepped = optimizer if scaled else torch.optim.AdamW(model.parameters(), **RATES)

            def steps(model=model, scaler=scaler, stepped=stepped):
                losses = []
                for step in range(3):
                    x, y = models.batch("gpt", step, dist.get_rank())
                    loss = models.loss_of(model(x), y)
                    scaler.scale(loss).backward()
                    scaler.step(stepped)
                    scaler.update()
                    stepped.zero_grad()
                    losses.append(mean_loss(loss))
                return losses

            if strategy in SHARDED:
                with pytest.raises(RuntimeError, match="takes the gradient of parameter .*, which .* has reduced"):
                    steps()
            else:
                assert_close(steps(), alone()[0])

    each_strategy(trains)


def test_PY05_errors_in_forward_evaluation_and_the_module_itself():
    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        inside = model.module if hasattr(model, "module") else model
        with pytest.raises((TypeError, RuntimeError, ValueError, AttributeError)):
            model("text")
        model.eval()
        with torch.no_grad():
            model(models.batch("gpt", 0, 0)[0])
        with torch.inference_mode():
            model(models.batch("gpt", 0, 0)[0])
        model.train()
        assert_close(losses_of(model, optimizer, "gpt", steps=2), alone(2)[0])
        model, optimizer = wrap(models.make("gpt"))
        inside = model.module if hasattr(model, "module") else model
        assert_close(losses_of(inside, optimizer, "gpt", steps=2), alone(2)[0])

    each_strategy(trains)


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


def test_PY05_changes_of_the_module_and_copies_are_refused():
    def refuses(strategy, wrap):
        net = models.make("gpt")
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
        net.norm.weight = torch.nn.Parameter(torch.ones(16))
        with pytest.raises(shoal.UsageError, match="the parameter norm.weight was replaced by another object"):
            losses_of(model, optimizer, "gpt", steps=1)

    each_strategy(refuses)


def test_PY05_wrong_arguments_are_one_sentence():
    def refuses(rank):
        net = models.make("gpt")
        with pytest.raises(shoal.UsageError, match="has no option find_unused; it has broadcast_buffers, find_unused_parameters"):
            shoal.nn.DistributedDataParallel(net, find_unused=True)
        with pytest.raises(shoal.UsageError, match="bucket_cap_mb is 'big', a str; give a number"):
            shoal.nn.DistributedDataParallel(net, bucket_cap_mb="big")
        with pytest.raises(shoal.UsageError, match="give the class of the optimizer"):
            shoal.optim.OSS(net.parameters(), models.adamw(net.parameters()))
        with pytest.raises(shoal.UsageError, match="LBFGS needs all parameters"):
            shoal.optim.OSS(net.parameters(), torch.optim.LBFGS)
        with pytest.raises(TypeError, match="momentum"):
            shoal.optim.OSS(net.parameters(), torch.optim.AdamW, momentum=0.9)
        with pytest.raises(shoal.UsageError, match="sparse gradients"):
            shoal.nn.DistributedDataParallel(torch.nn.Embedding(3, 3, sparse=True))
        model = shoal.nn.DistributedDataParallel(net)
        with pytest.raises(shoal.UsageError, match="is a DistributedDataParallel already"):
            shoal.nn.DistributedDataParallel(model)
        with pytest.raises(shoal.UsageError, match="its first argument is the FullyShardedDataParallel"):
            shoal.optim.FullyShardedOptimizer(net.parameters(), torch.optim.AdamW)

    on_ranks(refuses)


def test_PY05_wrap_policies_select_the_same_units():
    def units(rank):
        import functools

        from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policies = [
            models.Block,
            [models.Block],
            ["blocks.0", "blocks.1"],
            lambda module: isinstance(module, models.Block),
            ModuleWrapPolicy({models.Block}),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={models.Block}),
        ]
        found = [shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=one).units() for one in policies]
        assert all(one == found[0] for one in found) and len(found[0]) == 3
        by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
        assert len(shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=by_size).units()) > 1
        with pytest.raises(shoal.UsageError, match="auto_wrap_policy 3: give a class of modules"):
            shoal.nn.FullyShardedDataParallel(models.make("gpt"), auto_wrap_policy=3)

    on_ranks(units)


def test_PY04_a_step_that_fails_on_one_rank_is_abandoned_on_all():
    def trains(strategy, wrap):
        if strategy == "megatron":
            return
        model, optimizer = wrap(models.make("gpt"))
        if dist.get_rank() == 1:
            with pytest.raises(TypeError):
                model(3)
        else:
            x, y = models.batch("gpt", 0, 0)
            with pytest.raises(shoal.StepAbandoned, match="rank 1"):
                models.loss_of(model(x), y).backward()
                raise AssertionError("backward has not failed")
        if dist.get_rank() == 1:
            x, y = models.batch("gpt", 0, 1)
            loss = models.loss_of(model(x), y)
        else:
            optimizer.zero_grad()
            x, y = models.batch("gpt", 0, 0)
            loss = models.loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x, y = models.batch("gpt", 1, dist.get_rank())
        assert_close([mean_loss(models.loss_of(model(x), y))], alone(2)[0][1:])

    each_strategy(trains)


def test_PY06_the_scaler_for_sharded_gradients():
    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        scaler = shoal.amp.GradScaler(init_scale=1024.0)

        def step_of(step, poison=False):
            x, y = models.batch("gpt", step, dist.get_rank())
            loss = models.loss_of(model(x), y)
            scaler.scale(loss * (float("inf") if poison and dist.get_rank() == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return mean_loss(loss)

        if strategy == "megatron":
            with pytest.raises(shoal.UsageError, match="by its option scaler"):
                step_of(0)
            return
        losses = [step_of(step) for step in range(2)]
        step_of(2, poison=True)  # no rank updates
        assert scaler.get_scale() == 512.0
        losses.append(step_of(2))
        net = models.make("gpt")
        one = models.adamw(net.parameters())
        assert_close(losses, train_alone(net, one))
        # AdamW's steps hardly depend on the gradients' scale, its moments do.
        ours, theirs = optimizer.state_dict()["state"], one.state_dict()["state"]
        for index, entry in theirs.items():
            torch.testing.assert_close(ours[index]["exp_avg"], entry["exp_avg"])

    each_strategy(trains)


def test_PY05_torch_compile():
    def trains(strategy, wrap):
        if strategy in {"ddp", "fsdp"}:
            torch._dynamo.reset()
            model, optimizer = wrap(models.make("gpt"))
            assert_close(losses_of(torch.compile(model, backend="aot_eager"), optimizer, "gpt", steps=3), alone()[0])

    each_strategy(trains)


def test_PY06_state_of_another_optimizer_is_refused_and_whole_options_stay_whole():
    def trains(rank):
        net = models.make("gpt")
        adam = torch.optim.AdamW(net.parameters())
        train_alone(net, adam, steps=1)
        sgd = shoal.optim.OSS(models.make("gpt").parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        with pytest.raises(shoal.UsageError, match="has exp_avg, exp_avg_sq, step for .* keeps momentum_buffer"):
            sgd.load_state_dict(adam.state_dict())

        net, alone_net = models.make("gpt"), models.make("gpt")
        for one in (net, alone_net):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_("blocks" in name and parameter.dim() == 2)
        model = shoal.nn.FullyShardedDataParallel(net, shard_by_parameter=True)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.Muon, lr=1e-2)
        alone_optimizer = torch.optim.Muon([one for one in alone_net.parameters() if one.requires_grad], lr=1e-2)
        assert_close(losses_of(model, optimizer, "gpt", steps=3), train_alone(alone_net, alone_optimizer))

    on_ranks(trains)
