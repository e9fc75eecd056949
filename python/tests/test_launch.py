"""PY08: how programs are started, from the build tree: torchrun, shoal launch, mpirun, srun's variables, and alone."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shoal
from forked import run_all
from shoal import __main__ as commands

PROGRAM = """
import sys
import torch, torch.distributed as dist
import shoal
dist.init_process_group("shoal", init_method=sys.argv[1] if len(sys.argv) > 1 else None)
torch.manual_seed(dist.get_rank())
model = shoal.nn.DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():  # an optimizer of torch.optim would import torch._dynamo first, for longer than all else takes
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
same = all(torch.equal(weights[0], each) for each in weights)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: equal weights {same}", flush=True)
dist.destroy_process_group()
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "SHOAL_")


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def environment(**more):
    """This process's, without what a launcher has set."""
    return {**{key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}, **more}


def run(*command, code=0, env=None):
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=100, env=env or environment(), check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_forked(*arguments, code=0, env=None):
    """As run(sys.executable, *arguments), without an interpreter of its own."""
    codes, said = run_all([(arguments, env or environment())])
    assert codes == [code], said
    return said


def trained(said, ranks=2):
    return [said.count(f"rank {rank} of {ranks}: equal weights True") for rank in range(ranks)] == [1] * ranks


def test_PY08_torchrun(program):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert trained(run(*torchrun, program, "shoal://"))


def test_PY08_shoal_launch(program):
    assert trained(run(sys.executable, "-m", "shoal", "launch", "-n", 2, "--", sys.executable, program))


def test_PY08_shoal_launch_ends_with_a_failed_ranks_code(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    said = run_forked("-m", "shoal", "launch", "-n", 2, "--grace", 1, "--", sys.executable, path, code=7)
    assert "rank 1 ended with exit code 7" in said


@pytest.mark.parametrize("method", ["env://", "shoal://"])
def test_ELA10_a_rank_of_an_elastic_job_that_ends_before_it_appears_is_named_by_the_others(tmp_path, method):
    path = tmp_path / "dies.py"
    path.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "import torch.distributed as dist, shoal\n"
        "dist.init_process_group('shoal', init_method=sys.argv[1])\n"
    )
    said = run_forked("-m", "shoal", "launch", "-n", 3, "--elastic", 1, "--", sys.executable, path, method, code=137)
    assert said.count("rank 1 has ended, as its launcher says, before it appeared") >= 2


def mpirun(*command):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    env = environment(
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        OMPI_MCA_hwloc_base_binding_policy="none",
    )
    return run("mpirun", *command, env=env)


def test_PY08_mpirun(program):
    assert trained(mpirun("-n", 2, sys.executable, program, "shoal://"))


def test_PY01_collectives_over_mpi():
    program = Path(__file__).parent / "over_mpi.py"
    assert mpirun("-n", 3, sys.executable, program).count("right") == 3


def test_PY08_tasks_of_srun_find_each_other_by_slurms_variables(program):
    """As srun sets them for a step of two tasks on one node; srun itself needs a cluster."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    tasks = [((program, "shoal://"), environment(**step, SLURM_PROCID=str(rank))) for rank in range(2)]
    codes, said = run_all(tasks)
    assert codes == [0, 0] and trained(said), said


def test_PY08_a_process_alone_is_a_world_of_one(program):
    assert trained(run(sys.executable, program, "shoal://"), ranks=1)
    assert "RANK expected, but not set" in run_forked(program, code=1)


def test_PY08_a_notebook_makes_its_group_again_and_again(monkeypatch):
    for key in [key for key in os.environ if key.startswith(LAUNCHERS)]:
        monkeypatch.delenv(key)
    for _ in range(2):
        dist.init_process_group("shoal", init_method="shoal://")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1] and dist.get_world_size() == 1
        dist.destroy_process_group()


def test_PY08_one_rank_needs_no_address(monkeypatch):
    for key in [key for key in os.environ if key.startswith(LAUNCHERS)]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("shoal", init_method="shoal://")
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


def test_PY08_left_over_variables_make_no_rank_of_mpirun_a_world_of_its_own(monkeypatch):
    for key in [key for key in os.environ if key.startswith(LAUNCHERS)]:
        monkeypatch.delenv(key)
    left = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in {**left, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    for url in ("env://", "shoal://"):
        with pytest.raises(shoal.UsageError, match="unset RANK and WORLD_SIZE to train together"):
            dist.init_process_group("shoal", init_method=url)


def trains_in_a_notebook(scale):
    dist.init_process_group("shoal")
    torch.manual_seed(0)
    model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(4, 1))
    data = [torch.full((4,), float(value)) for value in range(8)]
    for x in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):
        model(scale * x).square().mean().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return dist.get_rank(), dist.get_world_size(), state


def test_PY08_a_notebook_starts_ranks_again_and_again():
    for ranks in (2, 3):
        results = shoal.launch.notebook_launcher(trains_in_a_notebook, args=(2.0,), num_processes=ranks)
        assert [result[:2] for result in results] == [(rank, ranks) for rank in range(ranks)]
        for name, value in results[0][2].items():
            assert all(torch.equal(value, result[2][name]) for result in results)


def fails_in_a_notebook(how):
    dist.init_process_group("shoal")
    if dist.get_rank() == 1:
        how()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda: 1 // 0, "rank 1 of 2 raised:.*ZeroDivisionError"),
        (lambda: os.kill(os.getpid(), 9), "rank 1 of 2 was ended by signal 9 .SIGKILL."),
        (lambda: os._exit(3), "rank 1 of 2 ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 6), f"rank 1 of 2 was ended by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_PY08_a_notebook_is_told_which_rank_failed_and_none_is_left(how, told):
    with pytest.raises(RuntimeError, match=re.compile(told, re.DOTALL)):
        shoal.launch.notebook_launcher(fails_in_a_notebook, args=(how,))
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False)
    assert [line for line in children.stdout.splitlines() if not line.startswith("ps ")] == []


def test_PY08_a_notebook_with_a_group_is_told_to_destroy_it(tmp_path):
    dist.init_process_group("shoal", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(shoal.UsageError, match="destroy_process_group"):
            shoal.launch.notebook_launcher(print)
    finally:
        dist.destroy_process_group()
    with pytest.raises(shoal.UsageError, match="num_processes 0"):
        shoal.launch.notebook_launcher(print, num_processes=0)


def test_PY08_shoals_own_method_takes_no_ranks():
    with pytest.raises(shoal.UsageError, match="from the launcher"):
        dist.init_process_group("shoal", init_method="shoal://", rank=0, world_size=2)


def test_PY08_doctor():
    said = run_forked("-m", "shoal", "doctor")
    assert "two ranks on this host communicate over: host" in said
    assert f"installed torch {torch.__version__}" in said


def test_PY08_doctor_needs_no_shared_memory_to_be_mounted(monkeypatch, capsys):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(commands.shutil, "disk_usage", absent)
    monkeypatch.setattr(commands, "_rank", lambda rank, store, pipe: pipe.send("well"))
    monkeypatch.setattr(commands, "_program", lambda: "true")
    assert commands.doctor() == 0
    assert "no /dev/shm" in capsys.readouterr().out


def test_PY08_doctor_tells_what_does_not_work(monkeypatch, capsys):
    def fails(rank, store, pipe):
        pipe.send("FAILED: the host has no shared memory")

    monkeypatch.setattr(commands, "_rank", fails)
    assert commands.doctor() == 1
    assert "FAILED: the host has no shared memory" in capsys.readouterr().out


def test_PY09_a_build_tree_has_no_files_for_cmake():
    assert "this is a build tree, which has no files for CMake" in run_forked("-m", "shoal", "cmake-dir", code=1)


def test_PY08_the_program_is_the_libraries():
    assert "--strategy" in run_forked("-m", "shoal", "train", "--help")
