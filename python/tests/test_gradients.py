"""PY05: what programs do to gradients and parameters beside the loop: hooks, create_graph, numpy, one encoder in two networks."""

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import assert_close, backward, each_strategy, train_alone
from ranks import on_ranks
from test_wrappers import group_over


def doubled(net):
    """Doubles a weight's gradient, by a hook of Python; returns the hook's calls."""
    calls = []

    def hook(gradient):
        calls.append(gradient.shape)
        return 2 * gradient

    next(net.parameters()).register_hook(hook)
    return calls


def test_PY05_hooks_of_parameters_from_before_wrapping_stay():
    def trains(strategy, wrap):
        net = models.make("gpt")
        doubled(net)
        expected = train_alone(net, models.adamw(net.parameters()))
        inner = models.make("gpt")
        calls = doubled(inner)
        model, optimizer = wrap(inner)
        losses = []
        for step in range(3):
            losses.append(backward(model, step))
            optimizer.step()
            optimizer.zero_grad()
        assert len(calls) == 3
        assert_close(losses, expected)
        del model, optimizer
        backward(inner, 3)
        assert len(calls) == 4  # those of the wrapper have gone, and nothing else

    each_strategy(trains)


def test_PY05_a_backward_through_grad_is_an_error():
    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        x, y = models.batch("gpt", 0, dist.get_rank())
        models.loss_of(model(x), y).backward(create_graph=True)
        refused = "has no graph.*torch.autograd.grad|takes the gradient of parameter"
        for through in (
            lambda penalty, parameters: penalty.backward(),
            lambda penalty, parameters: torch.autograd.grad(penalty, parameters),
            lambda penalty, parameters: (penalty + parameters[0].sum()).backward(inputs=parameters[:1]),
        ):
            with pytest.raises(RuntimeError, match=refused):
                parameters = list(model.parameters())
                through(sum(parameter.grad.square().sum() for parameter in parameters), parameters)

    each_strategy(trains)


# A gathered parameter's memory is another one's a moment later.
def test_PY05_numpy_of_gathered_parameters_keeps_their_values():
    def reads(rank):
        net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        model = shoal.nn.FullyShardedDataParallel(net, group_over("tcp"), auto_wrap_policy=torch.nn.Linear)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = [parameter.detach().numpy() for parameter in net.parameters()]
        lists = [parameter.data.cpu().tolist() for parameter in net.parameters()]
        texts = [str(parameter) for parameter in net.parameters()]
        with model.summon_full_params():
            arrays = [parameter.detach().numpy().copy() for parameter in net.parameters()]
        for one, values, text, array, value in zip(kept, lists, texts, arrays, model.state_dict().values(), strict=True):
            assert (one == array).all() and values == array.tolist() and (value.numpy() == array).all()
            assert text.startswith("Parameter containing:"), text

    on_ranks(reads)


# Shared by DDP and ZeRO-1, whose gradients are whole on every rank.
@pytest.mark.parametrize(
    "keep",
    [
        lambda grad: grad,
        lambda grad: grad.numpy(),
        lambda grad: grad.data[0],
        lambda grad: memoryview(grad.flatten().cpu().numpy()),
        lambda grad: torch.utils.dlpack.to_dlpack(grad),
    ],
    ids=["tensors", "numpy", "views", "memoryview", "dlpack"],
)
def test_PY05_gradients_that_are_kept_without_a_copy_stay(keep):
    def values(kept):
        return torch.from_dlpack(kept) if type(kept).__name__ == "PyCapsule" else torch.as_tensor(kept)

    def trains(strategy, wrap):
        net = models.make("gpt")
        expected = []
        train_alone(
            net,
            models.adamw(net.parameters()),
            prepare=lambda: expected.append([parameter.grad.clone() for parameter in net.parameters()]),
        )
        model, optimizer = wrap(models.make("gpt"))
        if strategy not in ("ddp", "zero1"):
            return
        inside = model.module
        kept = []
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            kept.append([keep(parameter.grad) for parameter in inside.parameters()])
            optimizer.step()
        for ours, theirs in zip(kept, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(values(one), values(keep(other)), rtol=1e-4, atol=1e-6)

    each_strategy(trains)


def test_PY06_hooks_of_an_optimizers_state_are_called():
    def saves(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        calls = []
        optimizer.register_state_dict_pre_hook(lambda own: calls.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda own, state: {**state, "note": 7})
        optimizer.register_load_state_dict_pre_hook(lambda own, state: calls.append(state.pop("note")))
        optimizer.register_load_state_dict_post_hook(lambda own: calls.append("after loading"))
        backward(model, 0)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert calls == ["before saving", 7, "after loading"] and state["note"] == 7, calls

    each_strategy(saves)


def halve_gradients(net):
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def test_PY05_hooks_of_parameters_after_wrapping_outlast_conversions():
    net = models.make("gpt")
    optimizer = models.adamw(net.parameters())
    expected = train_alone(net, optimizer, steps=1)
    halve_gradients(net)
    expected += train_alone(net, optimizer, steps=3, first=1)

    def trains(strategy, wrap):
        net = models.make("gpt")
        model, optimizer = wrap(net)
        losses = []
        for step in range(4):
            if step == 1:
                halve_gradients(net)
            if step == (2 if strategy == "megatron" else 1):  # which sees no forward
                net.double()
                net.float()
            losses.append(backward(model, step))
            optimizer.step()
            optimizer.zero_grad()
        assert_close(losses, expected)

    each_strategy(trains)


def test_FSDP05_hooks_of_parameters_after_wrapping_outlast_a_load_into_another_dtype():
    def trains(rank):
        net = torch.nn.Linear(4, 1)
        model = shoal.nn.FullyShardedDataParallel(net, param_dtype=torch.bfloat16)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.25)
        halve_gradients(net)
        for _ in range(2):
            before = model.state_dict()["weight"]
            model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(model.state_dict()["weight"], before - 0.25)
            model.load_state_dict(model.state_dict())

    on_ranks(trains)


def test_PY05_an_embedding_with_max_norm_is_refused():
    def wraps(rank):
        net = torch.nn.Sequential(torch.nn.Embedding(8, 3, max_norm=1.0), torch.nn.Linear(3, 2))
        with pytest.raises(shoal.UsageError, match="0 is an embedding with max_norm.*renorm_"):
            shoal.nn.DistributedDataParallel(net)
        with pytest.raises(shoal.UsageError, match="max_norm"):
            shoal.nn.FullyShardedDataParallel(net)
        with pytest.raises(shoal.UsageError, match="max_norm"):
            shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(shoal.UsageError, match="max_norm"):
            shoal.nn.ShardedDataParallel(net, optimizer)

    on_ranks(wraps)


class WithHead(torch.nn.Module):
    def __init__(self, encoder, outputs):
        super().__init__()
        self.encoder, self.head = encoder, torch.nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


def actor_and_critic():
    torch.manual_seed(3)
    encoder = torch.nn.Linear(4, 5)
    return WithHead(encoder, 3), WithHead(encoder, 1)


@pytest.mark.parametrize("views", [False, True])
def test_PY05_networks_with_one_encoder_in_wrappers_of_their_own(views):
    def trains(rank):
        wrapped = [shoal.nn.DistributedDataParallel(net, gradient_as_bucket_view=views) for net in actor_and_critic()]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in wrapped]
        nets = actor_and_critic()
        alone = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(7))
        for step in range(8):
            turn = [0, 1, 1, 0][step % 4]
            wrapped[turn](batch[3 * rank : 3 * rank + 3]).square().mean().backward()
            nets[turn](batch).square().mean().backward()
            for optimizer in (optimizers[turn], alone[turn]):
                optimizer.step()
                optimizer.zero_grad()
        for one in (0, 1):
            for parameter, expected in zip(wrapped[one].module.parameters(), nets[one].parameters(), strict=True):
                torch.testing.assert_close(parameter, expected)

    on_ranks(trains)


def test_PY06_the_scaler_sees_what_the_program_did_to_gradients():
    def trains(rank):
        net = torch.nn.Linear(3, 1, bias=False)
        model = shoal.nn.FullyShardedDataParallel(net)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = shoal.amp.GradScaler(init_scale=4.0)
        with model.summon_full_params():
            before = net.weight.detach().clone()
        scaler.scale(model(torch.ones(2, 3)).sum() * float("inf")).backward()
        net.weight.grad = torch.full((1, 3), 8.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        with model.summon_full_params():
            torch.testing.assert_close(net.weight.detach(), before - 0.2)
        assert scaler.get_scale() == 4.0

    on_ranks(trains)


def test_PY06_the_scaler_refuses_scales_that_differ():
    def trains(rank):
        net = torch.nn.Linear(3, 1, bias=False)
        model = shoal.nn.FullyShardedDataParallel(net)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = shoal.amp.GradScaler(init_scale=4.0 + rank)
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(shoal.DisagreeError, match=f"scales from 4 to 5, and this one has {4 + rank}: "):
            scaler.unscale_(optimizer)
        # An owner would divide the mean by its own scale, for all ranks.
        net = torch.nn.Linear(3, 1, bias=False)
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(shoal.DisagreeError, match=f"scales from 4 to 5, and this one has {4 + rank}: "):
            scaler.step(optimizer)

    on_ranks(trains)


def test_PY05_gradients_on_their_owners_are_zeroed_under_optimizers_that_take_them_together():
    def trains(rank):
        results = []
        for options in ({"fused": True}, {"foreach": True}):
            for set_to_none in (True, False):
                torch.manual_seed(0)
                net = torch.nn.Linear(3, 2)
                optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=0.1, **options)
                model = shoal.nn.ShardedDataParallel(net, optimizer)
                for step in range(3):
                    model(torch.full((2, 3), 1.0 + rank + step)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                results.append(net.weight.detach().clone())
        for one in results[1:]:
            torch.testing.assert_close(one, results[0])

    on_ranks(trains)


def test_PY06_the_scaler_skips_a_step_of_oss_on_all_ranks_where_one_has_found_inf():
    def trains(rank):
        net = torch.nn.Linear(3, 1, bias=False)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        before = net.weight.detach().clone()
        scaler = shoal.amp.GradScaler(init_scale=4.0)
        scaler.scale(torch.ones(1))
        for bad in range(2):  # in turn, since one of them owns the weight
            net.weight.grad = torch.full((1, 3), float("inf") if rank == bad else 8.0)
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(net.weight, before) and scaler.get_scale() == 1.0
        net.weight.grad = torch.full((1, 3), 2.0)
        scaler.step(optimizer)
        torch.testing.assert_close(net.weight.detach(), before - 0.2)

    on_ranks(trains)


def test_PY06_the_scaler_refuses_gradients_set_by_hand_that_ranks_do_not_share():
    def trains(rank):
        net = torch.nn.Linear(3, 1, bias=False)
        model = shoal.nn.FullyShardedDataParallel(net)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = shoal.amp.GradScaler(init_scale=4.0)
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        net.weight.grad = torch.full((1, 3), 8.0 + rank)
        with pytest.raises(shoal.DisagreeError, match="set by hand"):
            scaler.step(optimizer)

    on_ranks(trains)


def test_PY05_an_optimizer_whose_parameters_one_rank_owns_steps_with_gradients_set_by_hand():
    def trains(rank):
        net = torch.nn.Linear(3, 1, bias=False)
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for _ in range(2):
            model(torch.ones(2, 3))
            net.weight.grad = torch.ones(1, 3)
            optimizer.step()
        model(torch.ones(2, 3)).sum().backward()
        return net.weight.tolist()

    first, second = on_ranks(trains)
    assert first == second
