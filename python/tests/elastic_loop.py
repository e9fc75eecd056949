"""What the tests of shoal.Elastic train: a small net, its strategies, a loop, and its repetition in one process."""

import os
import signal

import torch
import torch._dynamo  # which a process's first optimizer imports: once for all ranks
import torch.distributed as dist

import shoal

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


def gossip(net):
    """On one host, whose mean is its own."""
    inside, across = shoal.distributed.host_groups()
    model = shoal.nn.FullyShardedDataParallel(net, inside, auto_wrap_policy=torch.nn.Linear)
    return model, shoal.optim.ShardGossipOptimizer(model, across, DyingAdamW, element_wise=True, lr=1e-2)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def local_sgd(net):
    """With an exchange after each step, and SGD, the mean of the parameters is that of a step with the mean gradient."""
    return net, shoal.optim.LocalUpdates(net, sgd(net), every=1, outer=shoal.optim.Averaging())


STRATEGIES = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "megatron": megatron, "fsdp": fsdp, "gossip": gossip, "local_sgd": local_sgd}


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


def trained_alone(steps, make=make_net):
    """A net after steps on all samples at once, in this process."""
    net = make()
    optimizer = make_optimizer(net)
    for _ in range(steps):
        loss_of(net(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


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
