"""Loops that a user of PyTorch pastes, in odd orders: each does what it says, or one sentence says what to do."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import models
import shoal
from loops import SHARDED, alone, assert_close, backward, each_strategy, train_alone
from ranks import on_ranks
from test_local_training import decentralized
from test_wrappers import RATES, losses_of, mean_loss


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


class Around(torch.nn.Module):
    """A model with a wrapper in it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)["logits"] * 1


def losses_of_micro_batches(scope, optimizer, run):
    losses = []
    for step in range(3):
        losses.append(0.0)
        for micro in range(2):
            with scope.no_sync(micro == 0):
                x, y = models.batch("gpt", 2 * step + micro, dist.get_rank())
                output = run(x)
                loss = models.loss_of(output if isinstance(output, dict) else output.flatten(0, 1), y)
                (loss / 2).backward()
            losses[-1] += mean_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def selective(operator):
    """Contexts that keep the results of this operator, and have backward compute the others again."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is operator else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY05_a_wrapper_may_be_in_what_is_checkpointed(transport):
    net = models.make("gpt")
    expected = train_alone(net, models.adamw(net.parameters()), micros=2)

    def trains(strategy, wrap):
        for around, options in ((False, {"context_fn": selective(torch.ops.aten.addmm.default)}), (True, {})):
            model, optimizer = wrap(models.make("gpt"))
            part = Around(model) if around else model
            scope = model if hasattr(model, "no_sync") else optimizer
            run = functools.partial(checkpoint, part, use_reentrant=False, **options)
            assert_close(losses_of_micro_batches(scope, optimizer, run), expected)

    each_strategy(trains, transport)


def test_DEC01_a_wrapper_may_be_in_what_is_checkpointed():
    def trains(rank):
        found = []
        for part in (lambda model: model, lambda model: functools.partial(checkpoint, model, use_reentrant=False)):
            model, optimizer = decentralized(models.make("gpt"), None)
            with torch.profiler.profile() as profiled:
                found.append(losses_of_micro_batches(model, optimizer, part(model)))
            ranges = [event for event in profiled.events() if event.name == "shoal::forward"]
            assert len(ranges) == 6  # none of what is computed again, which ends early
        assert_close(*found)

    on_ranks(trains)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY05_modes_of_the_program_see_its_own_operators_alone(transport):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    x, y = models.batch("gpt", 0, 0)

    def run(model):
        names.clear()
        with Seen():
            loss = models.loss_of(model(x), y)
        loss.backward()
        return list(names)

    def evaluate(model):
        names.clear()
        with torch.inference_mode(), Seen():
            model(x)
        return list(names)

    def sees(strategy, wrap):
        expected, in_evaluation = run(models.make("gpt")), evaluate(models.make("gpt"))
        model, optimizer = wrap(models.make("gpt"))
        for step in range(3):
            found = run(model)
            assert found == expected, (step, found)
            optimizer.step()
            optimizer.zero_grad()
        if strategy == "fsdp" and transport == "tcp":
            # Under a mode, inference_mode() calls operators without the keys of autograd, by which parameters are gathered.
            with pytest.raises(RuntimeError, match="is sharded and not in memory on this rank"):
                evaluate(model)
        else:
            assert evaluate(model) == in_evaluation

    each_strategy(sees, transport)


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
                with pytest.raises(shoal.UsageError, match="clip with"):
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
                with pytest.raises(shoal.UsageError, match="takes the gradient of parameter .*, which .* has reduced"):
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


def test_PY04_a_step_that_fails_on_one_rank_is_abandoned_on_all():
    def trains(strategy, wrap):
        if strategy == "megatron":
            return
        model, optimizer = wrap(models.make("gpt"))
        good = {name: value.clone() for name, value in model.state_dict().items()} if strategy in {"ddp", "zero1"} else None
        if dist.get_rank() == 1:
            with pytest.raises(TypeError):
                model(3)
        else:
            x, y = models.batch("gpt", 0, 0)
            with pytest.raises(shoal.StepAbandoned, match="rank 1"):
                models.loss_of(model(x), y).backward()
                raise AssertionError("backward has not failed")
        if good:  # the last good state: before the next forward has told the others on rank 1
            model.load_state_dict(good)
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


def test_PY06_a_param_group_is_added_or_the_error_says_what_to_do():
    def trains(strategy, wrap):
        net = models.make("gpt")
        if strategy in {"zero1", "zero2"}:
            inner = {id(parameter) for parameter in net.blocks.parameters()}
            optimizer = shoal.optim.OSS(net.blocks.parameters(), torch.optim.AdamW, **RATES)
            optimizer.add_param_group({"params": [each for each in net.parameters() if id(each) not in inner]})
            assert len(optimizer.param_groups) == 2
            sharded = strategy == "zero2"
            model = shoal.nn.ShardedDataParallel(net, optimizer) if sharded else shoal.nn.DistributedDataParallel(net)
            assert_close(losses_of(model, optimizer, "gpt", steps=3), alone()[0])
        elif strategy != "ddp":  # whose optimizer is PyTorch's
            _, optimizer = wrap(net)
            with pytest.raises(shoal.UsageError, match="construct it again with all param groups"):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})

    each_strategy(trains)
