"""Programs as other people write them, in their order of calls: what they train equals one process."""

import math

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from loops import each_strategy
from ranks import on_ranks
from test_local_training import decentralized
from test_wrappers import STRATEGIES, group_over, mean_loss

MICROS, STEPS = 3, 4


def rate_at(step):
    if step < 2:
        return 3e-3 * (step + 1) / 2
    return 3e-4 + 0.5 * (1 + math.cos(math.pi * (step - 2) / STEPS)) * 2.7e-3


def test_PY05_the_loop_of_nanogpt():
    """Rates written to param_groups, accumulation whose last micro-batch alone reduces by an attribute of PyTorch's wrapper, clipping,
    evaluation in between."""

    def alone():
        net = models.make("gpt")
        optimizer = models.adamw(net.parameters())
        losses = []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            for micro in range(MICROS):
                for rank in range(2):
                    x, y = models.batch("gpt", MICROS * step + micro, rank)
                    loss = models.loss_of(net(x), y) / MICROS / 2
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            net.eval()
            with torch.no_grad():
                losses.append(models.loss_of(net(models.batch("gpt", 0, 5)[0]), models.batch("gpt", 0, 5)[1]).item())
            net.train()
        return losses

    expected = alone()

    def trains(strategy, wrap):
        model, optimizer = wrap(models.make("gpt"))
        if strategy == "megatron":
            return  # clips by its option clip_grad
        clip = getattr(optimizer, "clip_grad_norm", None) or getattr(model, "clip_grad_norm_", None)
        losses = []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            for micro in range(MICROS):
                model.require_backward_grad_sync = micro == MICROS - 1
                x, y = models.batch("gpt", MICROS * step + micro, dist.get_rank())
                loss = models.loss_of(model(x), y) / MICROS
                loss.backward()
            assert model._core.steps() == step + 1
            clip(0.5) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.eval()
            with torch.no_grad():
                x, y = models.batch("gpt", 0, 5)
                losses.append(models.loss_of(model(x), y).item())
            model.train()
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6, (losses, expected)

    each_strategy(trains)


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))

    def forward(self, z):
        return self.body(z)


class Discriminator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)


def gan_step(parts, step, rank):
    """The order of PyTorch's DCGAN tutorial: the discriminator by a real and a fake batch with a backward each, then the
    generator through the discriminator."""
    generator, discriminator, for_generator, for_discriminator = parts
    loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
    random = torch.Generator().manual_seed(100 * step + rank)
    real, z = torch.randn(5, 6, generator=random) + 1, torch.randn(5, 4, generator=random)
    fake = generator(z)
    loss_real = loss_fn(discriminator(real), torch.ones(5))
    loss_real.backward()
    loss_fake = loss_fn(discriminator(fake.detach()), torch.zeros(5))
    loss_fake.backward()
    for_discriminator.step()
    discriminator.zero_grad()
    loss = loss_fn(discriminator(fake), torch.ones(5))
    loss.backward()
    for_generator.step()
    generator.zero_grad()
    discriminator.zero_grad()
    return loss_real + loss_fake, loss


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_PY05_a_gan_with_two_optimizers(strategy):
    def made():
        torch.manual_seed(11)
        return Generator(), Discriminator()

    def alone():
        """One process with the data of both ranks."""
        nets = made()
        optimizers = [models.adamw(net.parameters()) for net in nets]
        found = []
        loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
        for step in range(4):
            data = []
            for rank in range(2):
                random = torch.Generator().manual_seed(100 * step + rank)
                data.append((torch.randn(5, 6, generator=random) + 1, torch.randn(5, 4, generator=random)))
            generator, discriminator = nets
            fakes = [generator(z) for _, z in data]
            first = sum(
                loss_fn(discriminator(real), torch.ones(5)) + loss_fn(discriminator(fake.detach()), torch.zeros(5))
                for (real, _), fake in zip(data, fakes, strict=True)
            )
            (first / 2).backward()
            optimizers[1].step()
            discriminator.zero_grad()
            second = sum(loss_fn(discriminator(fake), torch.ones(5)) for fake in fakes)
            (second / 2).backward()
            optimizers[0].step()
            generator.zero_grad()
            discriminator.zero_grad()
            found += [first.item() / 2, second.item() / 2]
        return found

    expected = alone()

    def trains(rank):
        wrap = STRATEGIES[strategy]
        wrapped = [wrap(net, None, None) for net in made()]
        parts = [model for model, _ in wrapped] + [optimizer for _, optimizer in wrapped]
        found = []
        for step in range(4):
            found += [mean_loss(loss) for loss in gan_step(parts, step, rank)]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-6, (found, expected)

    on_ranks(trains)


def test_PY05_require_backward_grad_sync_is_the_scope_of_no_sync():
    def trains(rank):
        for wrap in (STRATEGIES["ddp"], STRATEGIES["zero2"], STRATEGIES["fsdp"], lambda net, *_: decentralized(net, None)):
            model, _ = wrap(torch.nn.Linear(2, 1), None, None)

            def steps(model=model):
                before = model._core.steps()
                model(torch.ones(1, 2)).sum().backward()
                return model._core.steps() - before

            model.require_backward_grad_sync = True
            assert model.require_backward_grad_sync and steps() == 1
            model.require_backward_grad_sync = False
            with model.no_sync():
                assert steps() == 0
                model.require_backward_grad_sync = True
                assert steps() == 1
            assert not model.require_backward_grad_sync and steps() == 0
            model.require_backward_grad_sync = 1
            with model.no_sync():
                assert steps() == 0
            assert model.require_backward_grad_sync and steps() == 1

    on_ranks(trains)


def ascend(parameters):
    """The first step of sharpness-aware training: up the gradients. Returns what takes it back."""
    own = [parameter.data.clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.5)
            parameter.grad = None
    return own


def train_sharpness_aware(rank, net, loss_of, local_backward, optimizer, reduce=None):
    for step in range(4):
        local_backward(lambda step=step: loss_of(step))
        own = ascend(list(net.parameters()))
        loss_of(step).backward()
        if reduce:
            reduce()
        for parameter, value in zip(net.parameters(), own, strict=True):
            parameter.data = value  # other memory, as davda54/sam does
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("begins", ["as it is", "written", "written to data", "loaded"])
def test_PY05_sharpness_aware_training_ascends_by_gradients_of_each_rank(begins):
    def made():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def begin(net):
        with torch.no_grad():
            if begins == "loaded":
                net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
            elif begins != "as it is":
                for parameter in net.parameters():
                    (parameter.data if begins == "written to data" else parameter).mul_(0.5)

    def trains(rank):
        def loss_with(model):
            return lambda step: model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean()

        def around(model, loss):
            with model.no_sync():
                loss().backward()

        def around_backward(model, loss):
            value = loss()
            with model.no_sync():
                value.backward()

        def by_attribute(model, loss):
            model.require_backward_grad_sync = False
            loss().backward()
            model.require_backward_grad_sync = True

        def reduce():
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

        net = made()
        begin(net)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        expected = train_sharpness_aware(rank, net, loss_with(net), lambda loss: loss().backward(), sgd, reduce)
        for transport in ("host", "tcp"):
            group = group_over(transport)
            for local in (around, around_backward, by_attribute):
                for zero1 in (False, True):
                    net = made()
                    kind = shoal.optim.OSS if zero1 else torch.optim.SGD
                    inner = (torch.optim.SGD, group) if zero1 else ()
                    optimizer = kind(net.parameters(), *inner, lr=0.1, momentum=0.9)
                    model = shoal.nn.DistributedDataParallel(net, group)
                    begin(net)
                    found = train_sharpness_aware(
                        rank, net, loss_with(model), lambda loss, local=local, model=model: local(model, loss), optimizer
                    )
                    for one, other in zip(found, expected, strict=True):
                        torch.testing.assert_close(one, other, msg=f"{transport} {local.__name__} zero1: {zero1}")

    on_ranks(trains)


def test_PY05_sharpness_aware_training_under_fsdp_is_an_error_on_all_ranks():
    def trains(rank):
        for transport in ("host", "tcp"):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
            model = shoal.nn.FullyShardedDataParallel(net, group_over(transport))
            optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
            with model.no_sync():
                gradients = torch.autograd.grad(model(x).square().mean(), list(net.parameters()), retain_graph=True)
                model(x).square().mean().backward()
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.add_(gradient, alpha=0.5)
            with pytest.raises(shoal.DisagreeError, match="loaded or written"):
                model(x)
            del model, optimizer

    on_ranks(trains)


class WithOwn(torch.nn.Module):
    """With a parameter and buffers of each rank."""

    def __init__(self, rank, trains):
        super().__init__()
        torch.manual_seed(2)
        self.body = torch.nn.Linear(3, 2)
        self.own = torch.nn.Module()
        self.own.scale = torch.nn.Parameter(torch.full((3,), 1.0 + rank), requires_grad=trains)
        self.own.register_buffer("shift", torch.full((3,), float(rank)))
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.full((3,), 1.0 + rank)), persistent=False)

    def forward(self, x):
        return self.body(x * self.own.scale + self.own.shift) * self.angles.real.sum()


@pytest.mark.parametrize("trains_own", [False, True])
def test_PY02_what_pytorchs_ddp_is_told_to_ignore_stays_the_ranks_own(trains_own):
    def trained(net):
        return [one for one in net.parameters() if one.requires_grad]

    def zero1(net, *_):
        optimizer = shoal.optim.OSS(trained(net), torch.optim.SGD, lr=0.1)
        return shoal.nn.DistributedDataParallel(net), optimizer

    def zero2(net, *_):
        optimizer = shoal.optim.OSS(trained(net), torch.optim.SGD, lr=0.1)
        return shoal.nn.ShardedDataParallel(net, optimizer), optimizer

    def local(net, *_):
        return net, shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2)

    kinds = {**STRATEGIES, "zero1": zero1, "zero2": zero2, "local": local, "decentralized": lambda net, *_: decentralized(net, None)}

    def trains(rank):
        for kind, wrap in kinds.items():
            if kind == "zero1" and trains_own:
                continue  # OSS sends the owner's values, as PyTorch's ZeroRedundancyOptimizer does
            net = WithOwn(rank, trains_own)
            # The second as PyTorch's own recipe spells a name of the module itself, the last as in programs for several models.
            net._ddp_params_and_buffers_to_ignore = {"own.scale", ".angles", "own.shift", "_orig_mod.freqs_cis"}
            if trains_own and kind not in ("ddp", "local"):
                with pytest.raises(shoal.UsageError, match=r"the parameter own.scale.*give ignored(_parameters)?=\[...\] and an optim"):
                    wrap(net, None, None)
                continue
            model, optimizer = wrap(net, None, None)
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            expected = WithOwn(rank, trains_own)
            assert torch.equal(net.own.shift, expected.own.shift) and torch.equal(net.angles, expected.angles), kind
            assert torch.equal(net.own.scale, expected.own.scale) != trains_own, kind
            values = [torch.zeros(3) for _ in range(2)]
            dist.all_gather(values, net.own.scale.detach())
            assert not torch.equal(*values), kind

    on_ranks(trains)
