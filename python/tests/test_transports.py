"""PY01, PY02: the backend over TCP, as between hosts."""

import copy
import time

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import errors_on_ranks, on_ranks

OVER_GLOO = {"pg_options": shoal.distributed.Options(transport="gloo")}


def test_PY01_collectives_over_gloo():
    def run(rank):
        assert shoal.distributed.group_of().transport == "gloo"
        tensor = torch.full((5, 4), rank + 1.0).t()
        dist.all_reduce(tensor)
        assert bool((tensor == 6).all())
        gathered = torch.empty(6)
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)))
        assert gathered.tolist() == [0, 0, 1, 1, 2, 2]
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(6.0))
        assert part.tolist() == [3 * (2 * rank), 3 * (2 * rank + 1)]
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.broadcast(part, src=2, group=pair)
            assert part.tolist() == [12, 15]
        network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        network(torch.ones(4, 3)).sum().backward()
        assert network.module.bias.grad.tolist() == [4, 4]

    on_ranks(run, ranks=3, init=OVER_GLOO)


def test_PY02_messages_over_gloo_end_without_a_waiter():
    def run(rank):
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            work = dist.isend(torch.full((300000,), 3.0), dst=1)
            store.get("received")
            end = time.monotonic() + 10
            while not work.is_completed():
                assert time.monotonic() < end
                time.sleep(0.01)
        else:
            tensor = torch.empty(300000)
            assert dist.recv(tensor) == 0
            store.set("received", "1")
            assert bool((tensor == 3).all())
        dist.isend(torch.ones(3), dst=1, tag=5) if rank == 0 else dist.recv(torch.empty(3), src=0, tag=5)
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda f: f.value()[0].sum().item())
        assert future.wait() == 6

    on_ranks(run, init=OVER_GLOO)


def test_PY04_ranks_that_disagree_over_gloo():
    errors = errors_on_ranks(lambda rank: dist.all_reduce(torch.ones(3 + rank)), init=OVER_GLOO)
    said = [error.split(" (detected by")[0] for error in errors]
    assert said[0] == said[1] and said[0].startswith("DisagreeError"), errors


def test_PY01_wrong_options_are_refused():
    def run(rank):
        with pytest.raises(shoal.UsageError, match="transport 'smoke' is not in this build; it has: auto, host, tcp, gloo"):
            shoal._C.join_world(dist.HashStore(), 0, 1, dist.default_pg_timeout, "smoke")

    on_ranks(run, ranks=1)
    errors = errors_on_ranks(lambda rank: None, init={"pg_options": 3})
    assert "shoal.distributed.Options, not int" in errors[0]


def test_PY01_a_value_of_a_stranger_in_the_store_is_named():
    def run(rank):
        store = dist.HashStore()
        store.set("shoal/0/visits/0", "many")
        with pytest.raises(shoal.CommError, match="the value of 'shoal/0/visits/0' in the job's store was not written by"):
            shoal._C.join_world(store, 0, 1, dist.default_pg_timeout, "auto")

    on_ranks(run, ranks=1)


def test_PY06_sharded_parameters_over_tcp_are_transformed_and_copied():
    def run(rank):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        alone = copy.deepcopy(net)
        for parameter in alone.parameters():
            dist.broadcast(parameter.data, 0)
        model = shoal.nn.FullyShardedDataParallel(net, auto_wrap_policy=torch.nn.Linear)
        with pytest.raises(RuntimeError, match=r"copy.deepcopy\(\), or of its clone\(\)"):
            copy.deepcopy(net.state_dict())
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 6

        def results(module):
            direction = torch.ones_like(x)
            jacobian = torch.func.jvp(module, (x,), (direction,))[1]
            each = torch.func.vmap(module)(x)
            return [jacobian, each, torch.func.grad(lambda v: module(v).sum())(x)]

        for ours, theirs in zip(results(net), results(alone), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12)
        kept = copy.deepcopy(model.state_dict())
        assert all(torch.equal(kept[name], value) for name, value in alone.state_dict().items())

    on_ranks(run, init={"pg_options": shoal.distributed.Options(transport="tcp")})
