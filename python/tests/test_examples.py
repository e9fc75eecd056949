"""PY10, PY12: the programs in examples/python, each on two ranks, by torchrun or as torchrun starts them. Those whose package
is not installed are skipped."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401: which a rank's first optimizer would import

from forked import run_as_torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package dataset-fashion-mnist
TEXT = Path("/usr/share/common-licenses/GPL-3")  # of the Debian package base-files


def run(name, *arguments):
    return run_as_torchrun(EXAMPLES / name, *arguments)


def run_by_torchrun(name, *arguments):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(each) for each in re.findall(pattern, text)]


def needs(*packages):
    """Imports them, once for all ranks."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install --no-deps {package}")
    for package in packages:
        importlib.import_module(package)


@pytest.mark.parametrize("wrapper", ["torch", "shoal"])
def test_ddp(wrapper):
    if not FASHION.is_dir():
        pytest.skip("no Fashion-MNIST: apt-get install dataset-fashion-mnist")
    start = run_by_torchrun if wrapper == "torch" else run
    said = start("ddp.py", FASHION, "--wrapper", wrapper, "--images", 2001, "--epochs", 2)
    accuracies = numbers(r"accuracy ([0-9.]+) of 2001 images on 2 ranks", said)
    assert len(accuracies) == 2 and accuracies[-1] > 0.7, said


def test_ELA01_ELA06_elastic_goes_on_when_a_rank_is_killed():
    if not FASHION.is_dir():
        pytest.skip("no Fashion-MNIST: apt-get install dataset-fashion-mnist")
    launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "2", "--elastic", "1:2", "--max-restarts", "1", "--"]
    program = [sys.executable, EXAMPLES / "elastic.py", FASHION, "--images", "2000", "--epochs", "3", "--die"]
    done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = numbers(r"accuracy ([0-9.]+) on [12] rank", done.stdout)
    assert len(accuracies) == 3 and accuracies[-1] > 0.7, done.stdout
    assert "rank 1 has ended; 1 rank goes on after step 19" in done.stderr, done.stderr


def test_fsdp_gpt_learns_and_goes_on_from_its_checkpoint(tmp_path):
    if not TEXT.is_file():
        pytest.skip(f"no {TEXT}")
    first = numbers(r"loss ([0-9.]+)", run("fsdp_gpt.py", TEXT, tmp_path, "--steps", 40))
    assert first[0] > 5 and first[-1] < 3.5, first
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("step-")] == ["step-40"]
    said = run("fsdp_gpt.py", TEXT, tmp_path, "--steps", 50)
    assert numbers(r"step (\d+)", said) == [40, 49], said
    assert abs(numbers(r"step 40: loss ([0-9.]+)", said)[0] - first[-1]) < 0.3, said
    assert len(said.split("The ", 1)[1]) > 60


def test_PY12_accelerate():
    needs("accelerate", "huggingface_hub")
    said = run("with_accelerate.py")
    assert numbers(r"accuracy ([0-9.]+) on 2 ranks", said)[-1] > 0.95 and "over host" in said, said


def test_PY12_lightning():
    needs("lightning", "pytorch_lightning")
    assert numbers(r"accuracy ([0-9.]+) on 2 ranks over host", run("with_lightning.py"))[0] > 0.95


def test_PY12_transformers_trainer(tmp_path):
    needs("transformers", "accelerate")
    ((first, last),) = re.findall(r"loss ([0-9.]+) to ([0-9.]+) on 2 ranks over host", run("with_transformers.py", TEXT, tmp_path))
    assert float(last) < 0.8 * float(first)


def test_PY12_deepspeed():
    needs("deepspeed", "hjson", "msgpack", "einops", "cpuinfo")
    found = dict(re.findall(r"ZeRO-(\d): accuracy ([0-9.]+) on 2 ranks over host", run("with_deepspeed.py", 1, 2, 3)))
    assert sorted(found) == ["1", "2", "3"] and min(map(float, found.values())) > 0.95, found
