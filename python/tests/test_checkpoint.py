"""Checkpoints: Python's trainings go on from them, under any strategy, and C++ opens them (PY07)."""

import json
import os
import subprocess

import numpy
import pytest
import torch
import torch.distributed as dist

import models
import shoal
from ranks import on_ranks
from test_wrappers import STRATEGIES, losses_of


def training_of(model, optimizer):
    parts = (optimizer,) if isinstance(optimizer, shoal.optim.DistributedOptimizer) else (model, optimizer)
    return shoal.checkpoint.TrainingState(*parts)


@pytest.mark.parametrize("reader", ["ddp", "zero2", "fsdp", "megatron"])
def test_PY07_a_training_goes_on_bit_equal_and_under_any_strategy(reader, tmp_path):
    def trains(rank):
        for writer in STRATEGIES:
            run = tmp_path / writer
            model, optimizer = STRATEGIES[writer](models.make("gpt"), None, None)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            losses_of(model, optimizer, "gpt", steps=2)
            schedule.step()
            shoal.checkpoint.save(run, training_of(model, optimizer), step=2, position="epoch 1")
            expected = losses_of(model, optimizer, "gpt", steps=2)

            torch.manual_seed(rank)
            other = models.Gpt()
            model, optimizer = STRATEGIES[reader](other, None, None)
            loaded = shoal.checkpoint.load_latest(run, training_of(model, optimizer))
            assert (loaded.step, loaded.position, loaded.ranks) == (2, "epoch 1", 2), loaded
            assert loaded.differences == [] and (loaded.exact or reader != writer), loaded
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1.5e-3)
            losses = losses_of(model, optimizer, "gpt", steps=2)
            assert losses == expected, (writer, losses, expected)

    on_ranks(trains)


def test_PY07_cpp_inspects_exports_and_python_reads_back(tmp_path):
    def saves(rank):
        model, optimizer = STRATEGIES["fsdp"](models.make("gpt"), None, None)
        losses_of(model, optimizer, "gpt", steps=2)
        training = training_of(model, optimizer)
        shoal.checkpoint.save_async(tmp_path / "run", training, step=7)
        training.wait()
        return {name: value.tolist() for name, value in model.state_dict().items()}

    state = on_ranks(saves)[0]
    alone = models.Gpt()
    loaded = shoal.checkpoint.load_module(tmp_path / "run", alone)
    assert loaded.step == 7
    for name, value in alone.state_dict().items():
        assert value.tolist() == state[name], name
    text = shoal_program("checkpoint", "inspect", str(tmp_path / "run"))
    assert "tokens.weight" in text and "exp_avg" in text, text


def shoal_program(*arguments):
    program = os.environ.get("SHOAL_PROGRAM")
    if not program:
        pytest.skip("the program shoal is not built")
    run = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


class Mlp(torch.nn.Module):
    """The C++ program's model of this name, as far as checkpoints see it."""

    def __init__(self, hidden):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = torch.nn.Linear(784, hidden), torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, 10)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "megatron"])
def test_PY07_a_run_of_cpp_goes_through_python_and_on_in_cpp(strategy, tmp_path):
    train = ["train", "--model", "mlp", "--data", "reference", "--ranks", "2", "--strategy", strategy, "--threads", "1"]
    first, second = tmp_path / "cpp", tmp_path / "python"
    shoal_program(*train, "--steps", "3", "--save", str(first))

    def passes(rank):
        model, optimizer = STRATEGIES[strategy](Mlp(128), None, None)
        optimizer.param_groups[0].update(lr=0.5, weight_decay=0.5)
        training = training_of(model, optimizer)
        loaded = shoal.checkpoint.load_latest(first, training)
        assert loaded.exact and loaded.step == 3, loaded
        assert optimizer.param_groups[0]["lr"] == 1e-3
        shoal.checkpoint.save(second, training, step=loaded.step, position=loaded.position)

    on_ranks(passes)
    reports = []
    for folder in (first, second):
        report = tmp_path / f"{folder.name}.json"
        shoal_program(*train, "--steps", "6", "--resume", str(folder), "--json", str(report))
        reports.append(json.loads(report.read_text()))
    assert reports[0]["loss"] == reports[1]["loss"] and reports[0]["params"] == reports[1]["params"], reports


def test_PY07_missing_files_and_other_models_are_errors_on_all_ranks(tmp_path):
    def refuses(rank):
        model, optimizer = STRATEGIES["ddp"](models.make("gpt"), None, None)
        training = training_of(model, optimizer)
        assert shoal.checkpoint.load_latest(tmp_path / "none", training) is None
        with pytest.raises(shoal.CheckpointError, match="none"):
            shoal.checkpoint.load(tmp_path / "none", training)
        shoal.checkpoint.save(tmp_path / "run", training)
        other, second = STRATEGIES["fsdp"](models.make("cnn"), None, None)
        with pytest.raises(shoal.UsageError, match="body.0"):
            shoal.checkpoint.load(tmp_path / "run", training_of(other, second))
        with pytest.raises(shoal.UsageError, match="do not make a training"):
            shoal.checkpoint.TrainingState(other, optimizer)

    on_ranks(refuses)


def test_PY07_local_and_decentralized_trainings_go_on(tmp_path):
    def trains(rank):
        def local():
            net = models.make("gpt")
            inner = models.adamw(net.parameters())
            optimizer = shoal.optim.LocalUpdates(net, inner, every=3, outer=shoal.optim.OuterNesterov())
            return net, optimizer, shoal.checkpoint.TrainingState(optimizer)

        def decentralized():
            model = shoal.nn.DecentralizedDataParallel(models.make("gpt"), torch.optim.AdamW, topology="ring", lr=3e-3)
            return model, model.optimizer, shoal.checkpoint.TrainingState(model)

        for name, make in (("local", local), ("decentralized", decentralized)):
            model, optimizer, training = make()
            losses_of(model, optimizer, "gpt", steps=4)
            shoal.checkpoint.save(tmp_path / name, training, step=4)
            expected = losses_of(model, optimizer, "gpt", steps=3)
            dist.barrier()
            model, optimizer, training = make()
            loaded = shoal.checkpoint.load(tmp_path / name, training)
            assert loaded.exact, (name, loaded)
            assert losses_of(model, optimizer, "gpt", steps=3) == expected, name
            dist.barrier()

    on_ranks(trains)


def test_PY07_a_decentralised_training_keeps_the_rates_of_its_schedule(tmp_path):
    def trains(rank):
        def make():
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
            groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters()), "lr": 0.2}]
            model = shoal.nn.DecentralizedDataParallel(
                net, torch.optim.SGD, topology="ring", params=groups, lr=0.1, momentum=0.5, bucket_cap_mb=1e-5
            )
            return model, torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.1)

        def step(model, schedule, number):
            model(torch.ones(2, 3) * (number + rank)).sum().backward()
            schedule.step()

        model, schedule = make()
        for number in range(2):
            step(model, schedule, number)
        shoal.checkpoint.save(tmp_path / "run", shoal.checkpoint.TrainingState(model), step=2)
        step(model, schedule, 2)
        again, schedule_again = make()
        loaded = shoal.checkpoint.load(tmp_path / "run", shoal.checkpoint.TrainingState(again))
        assert loaded.exact
        assert [group["lr"] for group in again.optimizer.param_groups] == [pytest.approx(0.001), pytest.approx(0.002)]
        schedule_again.last_epoch = 2
        step(again, schedule_again, 2)
        again.global_avg(), model.global_avg()
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-7)

    on_ranks(trains)


def test_PY07_a_decentralised_training_that_has_not_begun_keeps_its_options(tmp_path):
    def trains(rank):
        def make():
            model = shoal.nn.DecentralizedDataParallel(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1)
            return model, model.optimizer.param_groups[0], shoal.checkpoint.TrainingState(model)

        model, group, training = make()
        group.update(lr=0.025, momentum=0.9)
        shoal.checkpoint.save(tmp_path / "run", training, step=0)
        group["lr"] = 7.0
        again, group_again, training_again = make()
        for options, loaded in (
            (group, shoal.checkpoint.load(tmp_path / "run", training)),
            (group_again, shoal.checkpoint.load(tmp_path / "run", training_again)),
        ):
            assert loaded.exact
            assert (options["lr"], options["momentum"]) == (0.025, 0.9)

    on_ranks(trains)


@pytest.mark.parametrize("wraps", [False, True])
def test_PY07_a_module_that_has_changed_is_refused_and_not_saved_as_it_was(wraps, tmp_path):
    def saves(rank):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = shoal.nn.DistributedDataParallel(net) if wraps else net
        training = shoal.checkpoint.TrainingState(model, torch.optim.SGD(net.parameters(), lr=0.1))
        shoal.checkpoint.save(tmp_path / "run", training, step=1)
        net[1] = torch.nn.Linear(2, 2)
        with pytest.raises(shoal.UsageError, match="the module 1 was replaced by another object"):
            shoal.checkpoint.save(tmp_path / "run", training, step=2)
        with pytest.raises(shoal.UsageError, match="the module 1 was replaced by another object"):
            shoal.checkpoint.load(tmp_path / "run", training)

    on_ranks(saves)


def test_PY07_a_sharded_optimizer_resumes_with_a_model_of_another_memory_format(tmp_path):
    def resumes(rank):
        def make(memory_format):
            net = models.make("cnn").to(memory_format=memory_format)
            model = shoal.nn.DistributedDataParallel(net)
            return model, shoal.optim.OSS(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

        def step(model, optimizer):
            x, y = models.batch("cnn", 1, rank)
            loss = models.loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        model, optimizer = make(torch.contiguous_format)
        step(model, optimizer)
        shoal.checkpoint.save(tmp_path / "run", shoal.checkpoint.TrainingState(model, optimizer), step=1)
        expected = step(model, optimizer)
        model, optimizer = make(torch.channels_last)
        shoal.checkpoint.load(tmp_path / "run", shoal.checkpoint.TrainingState(model, optimizer))
        assert step(model, optimizer) == pytest.approx(expected, abs=1e-5)

    on_ranks(resumes)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_PY07_gradients_from_before_a_load_are_refused_until_they_are_dropped(strategy, tmp_path):
    def trains(rank):
        model, optimizer = STRATEGIES[strategy](torch.nn.Linear(3, 3), None, None)
        training = training_of(model, optimizer)
        shoal.checkpoint.save(tmp_path / strategy, training, step=1)
        model(torch.ones(1, 3)).sum().backward()
        shoal.checkpoint.load_latest(tmp_path / strategy, training)
        with pytest.raises(shoal.UsageError, match=r"before a checkpoint was loaded: drop it with zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        before = model.state_dict()["bias"].clone()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["bias"], before)

    on_ranks(trains)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_PY07_a_load_between_micro_batches_is_refused(strategy, tmp_path):
    def trains(rank):
        model, optimizer = STRATEGIES[strategy](torch.nn.Linear(3, 3), None, None)
        training = training_of(model, optimizer)
        shoal.checkpoint.save(tmp_path / strategy, training, step=1)
        with (optimizer if strategy == "megatron" else model).no_sync():
            model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(shoal.UsageError, match=r"a load: the gradient of parameter .* under no_sync"):
            shoal.checkpoint.load_latest(tmp_path / strategy, training)
        optimizer.zero_grad()
        shoal.checkpoint.load_latest(tmp_path / strategy, training)

    on_ranks(trains)


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_FSDP18_checkpoints_within_summon_full_params_are_refused(transport, tmp_path):
    def trains(rank):
        net = torch.nn.Linear(3, 3)
        model = shoal.nn.FullyShardedDataParallel(net)
        training = shoal.checkpoint.TrainingState(
            model, shoal.optim.FullyShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        )
        shoal.checkpoint.save(tmp_path, training, step=1)
        with model.summon_full_params():
            for act in (
                lambda: shoal.checkpoint.load_latest(tmp_path, training),
                lambda: shoal.checkpoint.save(tmp_path, training, step=2),
            ):
                with pytest.raises(shoal.UsageError, match=r"a checkpoint within summon_full_params\(\)"):
                    act()
        assert shoal.checkpoint.load_latest(tmp_path, training).step == 1

    on_ranks(trains, init={"pg_options": shoal.distributed.Options(transport=transport)})


def test_PY07_paths_steps_and_positions_of_any_kind(tmp_path):
    def saves(rank):
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 2)
        training = shoal.checkpoint.TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run = os.fsencode(tmp_path) + b"/\xff"
        shoal.checkpoint.save(os.fsdecode(run), training, step=numpy.int64(5))
        loaded = shoal.checkpoint.load_latest(os.fsdecode(run), training)
        assert loaded.step == 5 and os.fsencode(loaded.path).startswith(run)
        dist.barrier()
        for options, text in (
            ({"step": 2**63}, "step is 9223372036854775808, a int; give a whole number from"),
            ({"step": 1.5}, "step is 1.5, a float; give a whole number from"),
            ({"position": "\ud800"}, "position has characters that UTF-8 cannot encode"),
        ):
            with pytest.raises(shoal.UsageError, match=text):
                shoal.checkpoint.save(tmp_path / "run", training, **options)
        with pytest.raises(shoal.UsageError, match="the path of the checkpoint is empty"):
            shoal.checkpoint.save("", training)

    on_ranks(saves)


def test_PY07_pytorchs_own_sharding_is_refused_by_name(tmp_path):
    def refuses(rank):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.optim import ZeroRedundancyOptimizer

        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
        for model in (net, shoal.nn.DistributedDataParallel(net)):
            with pytest.raises(shoal.UsageError, match="ZeroRedundancyOptimizer keeps state in another.* use shoal.optim.OSS"):
                shoal.checkpoint.TrainingState(model, zero)
        for options in ({}, {"use_orig_params": True}):
            model = torch.nn.Sequential(
                FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"), **options)
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for act in (
                lambda: shoal.checkpoint.TrainingState(model, optimizer),
                lambda: shoal.checkpoint.save_module(tmp_path / "model.pt", model),
                lambda: shoal.checkpoint.load_module(tmp_path / "model.pt", model),
            ):
                with pytest.raises(shoal.UsageError, match="0 is PyTorch's FullyShardedDataParallel, whose parameters are shards"):
                    act()

    on_ranks(refuses)


def test_PY07_the_inner_optimizer_of_LocalUpdates_saves_no_mixture(tmp_path):
    def refuses(rank):
        net = models.make("gpt")
        inner = models.adamw(net.parameters())
        optimizer = shoal.optim.LocalUpdates(net, inner, every=50)
        losses_of(net, optimizer, "gpt", steps=1)
        with pytest.raises(shoal.DisagreeError, match="give LocalUpdates .* itself to TrainingState"):
            shoal.checkpoint.save(tmp_path / "run", shoal.checkpoint.TrainingState(net, inner), step=1)

    on_ranks(refuses)


class Scaled(torch.nn.Linear):
    scale = 1

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_PY07_a_state_of_a_modules_own_is_a_difference(tmp_path):
    def loads(rank):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), Scaled(2, 2))
        text = "1 has a state of its own, by get_extra_state(), which checkpoints do not hold"
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1), shoal.optim.DistributedOptimizer(net, torch.optim.SGD, lr=0.1)]
        for number, parts in enumerate(((net, optimizers[0]), (optimizers[1],))):
            training = shoal.checkpoint.TrainingState(*parts)
            shoal.checkpoint.save(tmp_path / f"{number}", training, step=1)
            loaded = shoal.checkpoint.load_latest(tmp_path / f"{number}", training)
            assert loaded.differences == [text] and not loaded.exact
        file = tmp_path / f"{rank}.safetensors"
        shoal.checkpoint.save_module(file, net)
        assert shoal.checkpoint.load_module(file, net).differences == [text]

    on_ranks(loads)
