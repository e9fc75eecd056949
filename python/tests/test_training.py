"""PY01: PyTorch's own parallel training on the backend equals one process, or its run on Gloo."""


import pytest
import torch
import torch._inductor.compile_fx  # noqa: F401: which torch.compile imports, once for all ranks
import torch.distributed as dist
from torch import nn

from ranks import on_ranks

STEPS = 6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch(step, rank, size):
    generator = torch.Generator().manual_seed(100 + step)
    inputs, targets = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def train(network, optimizer, rank, size):
    """Losses over the whole batch, step by step."""
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank, size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(inputs), targets)
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
        losses.append(value.item())
    return losses


def alone():
    network = model()
    return train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), 0, 1)


def ddp(rank):
    network = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    return train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), rank, 2)


def ddp_compiled(rank):
    network = torch.compile(nn.parallel.DistributedDataParallel(model()), backend="aot_eager")
    return train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), rank, 2)


def zero(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=1e-2)
    return train(network, optimizer, rank, 2)


def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    network = FullyShardedDataParallel(
        model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True
    )
    return train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), rank, 2)


def fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    network = model()
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    network.set_allocate_memory_from_process_group_for_comm(True)
    return train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), rank, 2)


@pytest.mark.parametrize("strategy", [ddp, zero, fsdp1, fsdp2, ddp_compiled], ids=lambda f: f.__name__)
def test_PY01_training_equals_one_process(strategy):
    expected = alone()
    for losses in on_ranks(strategy, timeout=110):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_PY01_tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    expected = model()(batch(0, 0, 1)[0])

    def run(rank):
        network = parallelize_module(
            model(), dist.init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        torch.testing.assert_close(network(batch(0, 0, 1)[0]), expected)

    on_ranks(run)


def test_PY01_dtensor_redistributes():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    def run(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2))
        whole = torch.arange(7 * 6.0).view(7, 6)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]):
            sharded = sharded.redistribute(mesh, placements)
            assert torch.equal(sharded.full_tensor(), whole)
        assert sharded.sum().item() == whole.sum().item()

    on_ranks(run, ranks=4)


def test_PY01_functional_collectives_eager_and_compiled():
    import torch.distributed._functional_collectives as functional

    def run(rank):
        def function(tensor):
            gathered = functional.all_gather_tensor(tensor * 2, gather_dim=0, group=dist.group.WORLD)
            return functional.all_reduce(gathered, "sum", dist.group.WORLD) + 1

        expected = 2 * torch.cat([torch.ones(3), 2 * torch.ones(3)]) * 2 + 1
        tensor = torch.full((3,), rank + 1.0)
        assert torch.equal(function(tensor) + 0, expected)
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(tensor), expected)

    on_ranks(run, timeout=110)


def test_PY01_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def run(rank):
        def fresh(seed):
            network = model()
            torch.manual_seed(seed)
            fully_shard(network, mesh=dist.init_device_mesh("cpu", (2,)))
            return network, torch.optim.AdamW(network.parameters(), lr=1e-2)

        network, optimizer = fresh(0)
        train(network, optimizer, rank, 2)
        weights, state = get_state_dict(network, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path))
        expected = train(network, optimizer, rank, 2)
        network, optimizer = fresh(1)
        weights, state = get_state_dict(network, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path))
        set_state_dict(network, optimizer, model_state_dict=weights, optim_state_dict=state)
        assert train(network, optimizer, rank, 2) == expected

    on_ranks(run, timeout=110)


def test_PY01_sparse_gradients_and_uneven_inputs():
    from torch.distributed.algorithms.join import Join

    def run(rank):
        torch.manual_seed(0)
        network = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)))
        network(torch.tensor([[rank, 5]])).sum().backward()
        gradient = network.module[0].weight.grad.to_dense()
        assert (gradient.abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 5]
        dense = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        with Join([dense]):
            for _ in range(2 + rank):
                dense(torch.ones(1, 2)).sum().backward()
        assert torch.isfinite(dense.module.weight.grad).all()

    on_ranks(run)
