"""PY06: values that programs load or write where FSDP converts parameters, or shows them in full."""

import resource

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import on_ranks
from test_wrappers import group_over


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY06_values_loaded_into_converted_parameters_keep_their_precision(transport):
    def loads(rank):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
        values = {name: torch.rand_like(value) for name, value in net.state_dict().items()}
        for value in values.values():
            dist.broadcast(value, 0)
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=1e-5)
        for _ in range(2):
            model.load_state_dict(values)
            model.eval()
            with torch.no_grad():
                assert model(torch.ones(2, 8)).dtype == torch.bfloat16
            model.train()
            for name, value in model.state_dict().items():
                assert torch.equal(value, values[name]), name
            model(torch.ones(2, 8)).square().mean().backward()
            assert net[0].weight.dtype == torch.bfloat16
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(loads)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_PY06_frozen_parameters_that_fsdp_converts_keep_their_precision(transport, tmp_path):
    def make(value):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
        net[0].requires_grad_(False)
        torch.nn.init.constant_(net[0].weight, value)
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        return model, shoal.checkpoint.TrainingState(model, optimizer), optimizer

    def keeps(rank):
        exact = torch.full((4, 8), 1.001)
        model, state, optimizer = make(1.001)
        model(torch.ones(2, 8)).float().sum().backward()
        optimizer.step()
        assert torch.equal(model.state_dict()["0.weight"], exact)
        shoal.checkpoint.save(tmp_path / "run", state, step=1)
        model, state, _ = make(0.0)
        shoal.checkpoint.load(tmp_path / "run", state)
        assert model.module[0].weight.dtype == torch.bfloat16
        assert torch.equal(model.state_dict()["0.weight"], exact)
        assert torch.equal(model.unwrap()[0].weight, exact)

    on_ranks(keeps)


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("options", [{}, {"writeback": False}, {"writeback": False, "rank0_only": True}])
def test_PY06_the_state_within_a_scope_of_full_parameters_has_what_was_written_there(transport, options):
    def writes(rank):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
        net[0].requires_grad_(False)
        for layer in net:
            torch.nn.init.constant_(layer.weight, 1.001)
        model = shoal.nn.FullyShardedDataParallel(net, group_over(transport), param_dtype=torch.bfloat16)
        before = {f"{i}.weight": torch.full(net[i].weight.shape, 1.001) for i in range(2)}
        written = {name: value.clone() for name, value in before.items()}
        for value in written.values():
            value[1] = 2.0
        here = rank == 0 or not options.get("rank0_only")

        def has(expected):
            state = model.state_dict()
            return all(torch.equal(state[name], value) for name, value in expected.items())

        with model.summon_full_params(**options):
            if here:
                with torch.no_grad():
                    for layer in net:
                        layer.weight[1].mul_(2)
            assert has(written if here else before)
        assert has(written if options.get("writeback", True) else before)

    on_ranks(writes)


def test_PY06_a_scope_of_full_parameters_that_finds_no_memory_leaves_nothing_open():
    def summons(rank):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(2560, 4096, bias=False))
        net[1].requires_grad_(False)  # the scope comes to it last
        model = shoal.nn.FullyShardedDataParallel(net)
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as pages:
            taken = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**24, unlimited[1]))
        with pytest.raises(RuntimeError, match="allocate"):
            with model.summon_full_params():
                pass
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        with torch.no_grad():
            net[0].weight.fill_(3.0)
        with model.summon_full_params(writeback=False):
            pass
        assert torch.equal(net[0].weight, torch.full((4, 4), 3.0)), "writes are noticed again"

    on_ranks(summons)


def test_PY06_what_fsdp_ignores_keeps_its_dtype_in_loads():
    def loads(rank):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
        values = {name: torch.ones(value.shape) for name, value in net.state_dict().items()}
        model = shoal.nn.FullyShardedDataParallel(net, param_dtype=torch.bfloat16, ignored_modules=["1"])
        model.load_state_dict(values)
        assert net[1].weight.dtype == torch.bfloat16
        model(torch.ones(2, 4)).sum().backward()

    on_ranks(loads)
