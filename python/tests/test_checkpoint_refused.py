"""PY07: checkpoints that do not fit, that ranks save or load differently, or that are lost: errors say so."""

import struct
import subprocess
import sys
import zipfile

import pytest
import torch

import shoal
from checkpoint_training import layers, train
from ranks import Ranks, on_ranks


@pytest.mark.parametrize(("before", "after"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("Adam", "AdamW")])
def test_PY07_the_state_of_another_optimizer_is_refused(before, after, tmp_path):
    def trains(rank):
        def make(kind):
            net = layers(freeze=False)
            more = {"momentum": 0.9} if kind == "SGD" else {}
            return shoal.nn.DistributedDataParallel(net), getattr(torch.optim, kind)(net.parameters(), lr=0.1, **more)

        model, optimizer = make(before)
        train(model, optimizer, rank)
        shoal.checkpoint.save(tmp_path, shoal.checkpoint.TrainingState(model, optimizer), step=3)
        model, optimizer = make(after)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        state = shoal.checkpoint.TrainingState(model, optimizer)
        if before == "Adam":
            shoal.checkpoint.load(tmp_path, state)
        else:
            with pytest.raises(shoal.UsageError, match=f"options of .*{before}|{before}Options"):
                shoal.checkpoint.load(tmp_path, state)
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
            assert not optimizer.state
        train(model, optimizer, rank)

    on_ranks(trains)


# The fused ones of torch.optim would write past its end.
@pytest.mark.parametrize("wrap", ["model", "local_updates"])
def test_PY07_a_state_of_another_shape_is_refused(wrap, tmp_path):
    def trains(rank):
        def make():
            net = torch.nn.Linear(16, 16)
            optimizer = torch.optim.Adam(net.parameters(), fused=True)
            if wrap == "local_updates":
                return net, optimizer, shoal.checkpoint.TrainingState(shoal.optim.LocalUpdates(net, optimizer))
            model = shoal.nn.DistributedDataParallel(net)
            return net, optimizer, shoal.checkpoint.TrainingState(model, optimizer)

        net, optimizer, state = make()
        net(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        shoal.checkpoint.save(tmp_path / "good", state)
        optimizer.state[net.weight]["exp_avg"] = torch.zeros(2)
        shoal.checkpoint.save(tmp_path / "bad", state)
        net, optimizer, state = make()
        shoal.checkpoint.load(tmp_path / "good", state)
        with pytest.raises(shoal.UsageError, match=r"exp_avg of shape \[2\] for a parameter of shape \[16, 16\]"):
            shoal.checkpoint.load(tmp_path / "bad", state)

    on_ranks(trains)


def test_PY07_a_parameter_that_is_not_the_modules_is_named():
    def trains(rank):
        net = torch.nn.Linear(2, 2)
        temperature = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([*net.parameters(), temperature], lr=0.1)
        training = shoal.checkpoint.TrainingState(shoal.nn.DistributedDataParallel(net), optimizer)
        with pytest.raises(shoal.UsageError, match=r"a parameter \[3\] of param group 0 is not one of the module's"):
            shoal.checkpoint.save("nowhere", training, step=1)

    on_ranks(trains)


def test_PY07_a_small_file_does_not_take_much_memory(tmp_path):
    """It makes one tensor of 64 sizes, and recalls it again and again."""
    key = b"k" * 256
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x000"
    pickle += b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX" + struct.pack("<I", 256) + key
    pickle += b"X\x03\x00\x00\x00cpuK\x00tQq\x010"
    pickle += b"(h\x01K\x00(" + b"K\x00" * 64 + b"tq\x02h\x02\x89Ntq\x030"
    pickle += b"]q\x04(" + b"h\x00h\x03R" * 100_000 + b"e."
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/version", b"3\n")

    def loads(rank):
        with pytest.raises(shoal.CheckpointError, match="stands for more than 64 MiB"):
            shoal.checkpoint.load_module(tmp_path / "small.pt", torch.nn.Linear(2, 2))

    for ended in Ranks(loads, ranks=1).outcomes(timeout=60):
        assert ended[0], ended


def test_PY07_ranks_that_load_with_other_options_are_told(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state)
        with pytest.raises(shoal.DisagreeError, match="rates"):
            shoal.checkpoint.load(tmp_path / "run", state, rates=rank == 0)

    on_ranks(run)


def test_PY07_a_background_save_that_failed_is_told_at_the_end(tmp_path):
    program = (
        "import builtins, torch, shoal\n"
        "torch.distributed.init_process_group('shoal', init_method='shoal://')\n"
        "net = torch.nn.Linear(2, 1)\n"
        "builtins.state = state = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "shoal.checkpoint.save_async('/proc/nope/run', state)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "background save has failed, and nobody called wait()" in ended.stderr


def test_PY07_values_that_differ_after_a_load_are_named(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        state = shoal.checkpoint.TrainingState(model, shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", state)
        shoal.checkpoint.load(tmp_path / "run", state)
        model(torch.ones(1, 2)).sum().backward()
        shoal.checkpoint.load(tmp_path / "run", state)
        with torch.no_grad():
            net.weight.add_(rank)
        with pytest.raises(shoal.DisagreeError, match="weight"):
            model(torch.ones(1, 2))

    on_ranks(run)


def test_PY07_what_one_rank_alone_gives_wrongly_is_told_to_all(tmp_path):
    def run(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = shoal.checkpoint.TrainingState(model, optimizer)

        def refused(call, text, **options):
            with pytest.raises(shoal.UsageError if rank == 0 else Exception, match=text) as error:
                call(tmp_path / "run", state, **(options if rank == 1 else {}))
            assert rank == 1 or str(error.value).startswith("rank 1: "), error.value

        save, load = shoal.checkpoint.save, shoal.checkpoint.load
        refused(save, "position has 3000000 bytes, 2097152 at most", position="x" * 3_000_000)
        refused(save, "half a surrogate pair", position="\ud800")
        refused(shoal.checkpoint.save_async, "step is 'one', a str", step="one")
        refused(save, "save has no option stop", stop=1)
        save(tmp_path / "run", state)
        refused(load, "partial is 1, a int", partial=1)
        refused(shoal.checkpoint.load_latest, "load has no option steps", steps=1)
        if rank == 1:
            optimizer.param_groups[0]["schedule"] = object()
        refused(save, "the optimizer's option schedule is a object")
        if rank == 1:
            del optimizer.param_groups[0]["schedule"]
            net.bias = torch.nn.Parameter(torch.ones(1))
        refused(save, "bias")

    on_ranks(run)


def test_PY07_a_prefix_that_the_modules_names_lack_is_named(tmp_path):
    net, file = torch.nn.Linear(2, 2), tmp_path / "wrapped.pt"
    values = {f"module.{name}": torch.ones_like(value) for name, value in net.state_dict().items()}
    torch.save(values, file)
    for options in ({}, {"partial": True}):
        with pytest.raises(shoal.UsageError, match=r"with the prefix module\., which load_module\(\) takes"):
            shoal.checkpoint.load_module(file, net, **options)
    assert shoal.checkpoint.load_module(file, net, prefix="module.").differences == []
    assert torch.equal(net.weight, values["module.weight"])
