"""PY02: what programs for PyTorch's wrappers and optimizers pass."""

import abc
import inspect
import typing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.optim import ZeroRedundancyOptimizer
from ranks import on_ranks

import shoal


def refused(act):
    with pytest.raises(shoal.UsageError) as error:
        act()
    return str(error.value)


def test_PY02_options_of_pytorch_whose_value_changes_nothing_are_taken():
    def wraps(rank):
        shoal.nn.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=None, output_device=None, init_sync=True)
        shoal.nn.FullyShardedDataParallel(torch.nn.Linear(2, 2), use_orig_params=True, limit_all_gathers=True, device_id=None)
        plain = {"cpu_offload": CPUOffload(offload_params=False), "mixed_precision": MixedPrecision(), "ignored_states": []}
        shoal.nn.FullyShardedDataParallel(torch.nn.Linear(2, 2), **plain)
        on_cpu = {"cpu_offload": CPUOffload(offload_params=True), "device_id": torch.device("cpu")}
        shoal.nn.FullyShardedDataParallel(torch.nn.Linear(2, 2), **on_cpu)

    on_ranks(wraps)


def test_PY02_the_defaults_of_pytorchs_classes_are_taken():
    def oss(net, **options):
        return shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1, **options)

    pairs = [
        (torch.nn.parallel.DistributedDataParallel, shoal.nn.DistributedDataParallel),
        (FullyShardedDataParallel, shoal.nn.FullyShardedDataParallel),
        (ZeroRedundancyOptimizer, oss),
    ]

    def makes(rank):
        for theirs, ours in pairs:
            parameters = inspect.signature(theirs.__init__).parameters.values()
            defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
            for name, default in defaults.items():
                ours(torch.nn.Linear(2, 2), **{name: default})
            ours(torch.nn.Linear(2, 2), **defaults)

    on_ranks(makes, ranks=1)


def test_PY02_others_say_what_to_use():
    def wraps(rank):
        net = torch.nn.Linear(2, 2)
        ddp, fsdp = shoal.nn.DistributedDataParallel, shoal.nn.FullyShardedDataParallel
        return [
            refused(lambda: ddp(net, device_ids=[0])),
            refused(lambda: ddp(net, init_sync=False)),
            refused(lambda: ddp(net, forward_sync_buffers=False)),
            refused(lambda: fsdp(net, mixed_precision=object())),
            refused(lambda: fsdp(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))),
            refused(lambda: fsdp(torch.nn.Linear(2, 2, device="meta"), cpu_offload=CPUOffload(offload_params=True))),
            refused(lambda: fsdp(net, device_id=0)),
            refused(lambda: fsdp(net, device_id="gpu")),
            refused(lambda: fsdp(net, auto_wrap_policy=torch.nn.ReLU())),
            refused(lambda: fsdp(net, sharding_strategy="some_shard")),
            refused(lambda: ddp(net, nothing_of_the_kind=1)),
            refused(lambda: shoal.nn.ShardedDataParallel(net, torch.optim.SGD(net.parameters(), 0.1))),
            refused(lambda: shoal.optim.OSS(net, torch.optim.SGD, lr=0.1)),
            refused(lambda: shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)),
        ]

    expected = [
        "move the module",
        "rank 0's values",
        "use the option broadcast_buffers",
        "param_dtype, reduce_dtype",
        "averages of the weights need model.state_dict()",
        "stay on the device",
        "move the module",
        "move the module",
        "give its class, auto_wrap_policy=ReLU",
        "choose from",
        "it has",
        "shoal.optim.OSS",
        "parameters()",
        "after backward",
    ]
    for texts in on_ranks(wraps):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_PY02_methods_that_are_elsewhere_are_no_attributes_and_say_what_to_write():
    def wraps(rank):
        oss = shoal.optim.OSS(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        ddp = shoal.nn.DistributedDataParallel(torch.nn.Linear(2, 2))
        fsdp = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(2, 2))
        assert not any([hasattr(oss, "consolidate_state_dict"), hasattr(ddp, "register_comm_hook"), hasattr(fsdp, "nothing")])
        with pytest.raises(AttributeError, match=r"call state_dict\(\), which has the whole state, on every rank"):
            oss.consolidate_state_dict(recipient_rank=0)
        with pytest.raises(AttributeError, match=r"DistributedDataParallel has no join\(\): write the loop with shoal.Join"):
            ddp.join()
        for model in (ddp, fsdp):
            with pytest.raises(AttributeError, match="DataParallel has no register_comm_hook.*give the hook to its constructor"):
                model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        with pytest.raises(AttributeError, match=r"has no _set_static_graph\(\): give static_graph=True"):
            ddp._set_static_graph()
        for owner in (fsdp, type(fsdp)):
            assert not hasattr(owner, "state_dict_type") and not hasattr(owner, "nothing")
            with pytest.raises(AttributeError, match=r"has no optim_state_dict\(\): optimizer.state_dict\(\) has the whole state"):
                owner.optim_state_dict(fsdp, None)
        with pytest.raises(AttributeError, match=r"has no set_accumulate_grad\(\): run the micro-batches before"):
            shoal.nn.DecentralizedDataParallel.set_accumulate_grad

        class Protocol(typing.Protocol):
            def set_model_state_dict(self): ...

        class Joining:
            def join(self):
                return "joined"

        for parent in (shoal.nn.DistributedDataParallel, shoal.nn.FullyShardedDataParallel):
            for base in (abc.ABC, Protocol, Joining):

                class Mine(parent, base):
                    pass

                model = Mine(torch.nn.Linear(2, 2))
                with pytest.raises(AttributeError, match="Mine has no register_comm_hook.*give the hook to its constructor"):
                    model.register_comm_hook
                if base is Joining:
                    assert model.join() == Mine.join(model) == "joined"

    on_ranks(wraps)


def test_PY02_values_are_given_as_to_pytorch():
    def clips(rank):
        net = torch.nn.Linear(2, 1)
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = shoal.nn.ShardedDataParallel(net, optimizer)
        model(torch.tensor([[3.0, -4.0]])).sum().backward()
        sharded = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(2, 1))
        sharded(torch.tensor([[3.0, -4.0]])).sum().backward()
        assert shoal.amp.GradScaler("cpu", 2.0).get_scale() == 2.0
        return optimizer.clip_grad_norm(1, "inf").item(), sharded.clip_grad_norm_(1, "inf").item()

    assert on_ranks(clips) == [(4.0, 4.0)] * 2


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = (torch.nn.Linear(3, 3, bias=False) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def test_PY02_a_tied_parameter_is_ignored_by_any_of_its_names():
    def ddp(net, name):
        model = shoal.nn.DistributedDataParallel(net, ignored=[name + ".weight"])
        model.load_state_dict(model.state_dict())  # what is ignored may differ
        return model, torch.optim.SGD(net.body.parameters(), lr=0.1)

    def megatron(net, name):
        return net, shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1, ignored=[name + ".weight"])

    def fsdp(net, name, **ignored):
        model = shoal.nn.FullyShardedDataParallel(net, **(ignored or {"ignored_parameters": [name + ".weight"]}))
        return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)

    def trains(rank):
        for wrap in (ddp, megatron, fsdp, lambda net, name: fsdp(net, name, ignored_modules=[name])):
            for name in ("embed", "head"):
                net = Tied()
                with torch.no_grad():
                    net.embed.weight.add_(rank)
                before = net.embed.weight.detach().clone()
                model, optimizer = wrap(net, name)
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                assert torch.equal(net.embed.weight, before), name
                assert not torch.equal(net.body.weight, Tied().body.weight)

    on_ranks(trains)


def test_PY02_a_sequential_is_indexed_through_fsdp():
    def indexes(rank):
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        model = shoal.nn.FullyShardedDataParallel(net)
        assert model[0] is net[0] and list(model) == list(net) and list(model[1:]) == [net[1]]

    on_ranks(indexes)


def test_PY02_integer_parameters_may_come_first():
    def trains(rank):
        net = torch.nn.Module()
        net.positions = torch.nn.Parameter(torch.arange(8), requires_grad=False)
        net.linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(net.linear.weight)
        net.forward = lambda x: net.linear(x) * net.positions.sum()
        optimizer = shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = shoal.nn.DistributedDataParallel(net)
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        return net.linear.weight.tolist()

    for weight in on_ranks(trains):
        assert weight == [[pytest.approx(1 - 0.1 * 28 * 0.5)] * 2]


def test_PY06_one_form_of_training_state_for_every_strategy(tmp_path):
    def saves(rank):
        net = torch.nn.Linear(2, 2)
        optimizer = shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
        shoal.checkpoint.save(tmp_path, shoal.checkpoint.TrainingState(net, optimizer), step=1)
        dist.barrier()
        return refused(lambda: shoal.checkpoint.TrainingState(torch.nn.Linear(2, 2), optimizer))

    for text in on_ranks(saves):
        assert "give the wrapper and its optimizer" in text
    assert (tmp_path / "step-1").exists()


def test_BEY10_a_step_ends_between_forward_and_backward_on_one_rank():
    def trains(rank):
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        said = []
        for step in range(4):
            try:
                optimizer.zero_grad()
                output = model(torch.ones(1, 1)) * 10**step
                if step == 1 and rank == 1:
                    model.abandon_step()  # skips its batch
                    continue
                if step == 3 and rank == 1:
                    del output
                    output = model(torch.ones(1, 1)) * 10**step  # as if it had skipped one and said nothing
                output.sum().backward()
                optimizer.step()
            except RuntimeError as error:
                said.append(type(error).__name__)
        return net.weight.item(), said

    first, second = on_ranks(trains)
    assert first[0] == second[0] == -101.0
    assert first[1] == ["StepAbandoned", "UsageError"] and second[1] == ["UsageError"], (first, second)
