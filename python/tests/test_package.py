"""PY08, PY09: the wheel of the build tree (SHOAL_BUILD, or build/) in a fresh virtual environment. Its programs run with a
PATH that has nothing but that environment: no compiler and no mpirun."""

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("SHOAL_BUILD", REPOSITORY / "build"))

SHORT = """
import torch, torch.distributed as dist
import shoal
dist.init_process_group("shoal")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4)[dist.get_rank()::2]
first = None
for _ in range(20):
    optimizer.zero_grad()
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    first = first or loss.item()
told = "learned" if loss.item() < 0.2 * first else "failed"
print(f"{told} {shoal.distributed.group_of().transport}", flush=True)  # in one write: ranks share the output
dist.destroy_process_group()
"""

OVER_MPI = SHORT.replace(
    '("shoal")', '("shoal", init_method="shoal://", pg_options=shoal.distributed.Options(transport="mpi"))'
)

# A program as somebody writes it who has never seen shoal's documentation, but for the name of the backend.
USUAL = """
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import shoal  # noqa: F401


class Points(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        x = torch.randn(2, generator=g)
        return x, (x[0] * x[1] > 0).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save")
    args = parser.parse_args()
    dist.init_process_group(backend="shoal")
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = dist.get_rank()
    torch.manual_seed(42 + rank)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    dataset = Points()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        correct = torch.zeros(1)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
            correct += (out.argmax(1) == y).sum()
        scheduler.step()
        dist.all_reduce(correct, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct.item() / len(dataset):.3f} local rank {local_rank}")
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    state = torch.load(args.save, map_location="cpu", weights_only=True)
    same = all(torch.equal(state[name], value) for name, value in model.module.state_dict().items())
    print(f"rank {rank} of {dist.get_world_size()}: saved what it has: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def run(*command, **options):
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel():
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("no scikit-build-core: scripts/setup --tests installs it")
    if not (BUILD / "build.ninja").is_file():
        pytest.skip(f"{BUILD} is no build tree: make all, or set SHOAL_BUILD")
    known = subprocess.run(["ninja", "-C", str(BUILD), "-t", "query", "wheel"], capture_output=True, check=False)
    if known.returncode != 0:
        pytest.skip("this build has no target `wheel`: libcrypto.a or libz.a is missing, or there is no extension")
    run("cmake", "--build", BUILD, "--target", "wheel")
    (made,) = (BUILD / "dist").glob("shoal-*.whl")
    return made


@pytest.fixture(scope="session")
def environment(tmp_path_factory, wheel):
    """A fresh virtual environment with the wheel: its Python, and environments of processes without and with the system's
    programs. PyTorch comes from this Python, so that nothing is downloaded."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", env=clean).strip())
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not (packages / entry.name).exists() and not entry.name.startswith(("shoal", "__editable__")):
            (packages / entry.name).symlink_to(entry)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, env=clean)
    return python, {**clean, "PATH": str(folder / "bin")}, clean


@pytest.fixture(scope="session")
def binaries(environment):
    """The wheel's extension, library and program, as they are installed."""
    python, bare, _ = environment
    package = Path(run(python, "-c", "import importlib.util as u; print(*u.find_spec('shoal').submodule_search_locations)", env=bare).strip())
    found = [*package.glob("_C*.so"), *package.glob("lib/libshoal.so*"), package / "bin" / "shoal"]
    assert len(found) == 3, found
    return found


def test_PY09_the_wheel_is_small_and_names_its_torch(wheel):
    assert wheel.stat().st_size < 10 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    python, tagged = f"cp3{sys.version_info.minor}", importlib.util.find_spec("auditwheel") is not None
    assert re.search(f"-{python}-{python}-{'manylinux_2_[0-9]+' if tagged else 'linux'}_", wheel.name), wheel.name
    assert "Requires-Dist: torch==" + torch.__version__.split("+")[0] in metadata
    for part in ("shoal/lib/libshoal.so", "shoal/bin/shoal", "shoal/include/shoal/shoal.h", "lib/cmake/shoal/shoalConfig.cmake"):
        assert any(part in name for name in names), part


def test_PY09_the_wheel_trains_on_two_ranks_of_shoal_launch(environment, tmp_path):
    python, bare, _ = environment
    program = tmp_path / "train.py"
    program.write_text(SHORT)
    launched = run(python, "-m", "shoal", "launch", "-n", 2, "--", python, program, env=bare)
    assert launched.count("learned host") == 2


def test_PY09_the_program_in_readme_runs_from_the_wheel(environment, tmp_path):
    python, bare, _ = environment
    (code,) = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.S | re.M)
    program = tmp_path / "train.py"
    program.write_text(code)
    said = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", program, env=bare)
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+) on 2 ranks", said)]
    assert len(losses) == 2 and max(losses) < 30, said  # about 80 at first


def test_PY09_a_usual_program_runs_under_torchrun(environment, tmp_path):
    python, bare, _ = environment
    program = tmp_path / "train.py"
    program.write_text(USUAL)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = run(*torchrun, program, "--save", tmp_path / "model.pt", env=bare)
    accuracies = [float(each) for each in re.findall(r"accuracy ([0-9.]+)", said)]
    assert len(accuracies) == 5 and accuracies[-1] > 0.9 > accuracies[0], said
    for rank in range(2):
        assert f"rank {rank} of 2: saved what it has: True" in said


def test_PY08_doctor_and_the_program_run(environment):
    python, bare, _ = environment
    told = run(python, "-m", "shoal", "doctor", env=bare)
    assert "two ranks on this host communicate over: host" in told and "dev_shm_gib" in told, told
    assert json.loads(run(python, "-m", "shoal", "doctor", "--json", "-", env=bare))["transports"]["tcp"] == "yes"
    assert "shoal" in run(python.parent / "shoal", "--version", env=bare)


def test_PY09_binaries_need_only_libtorch_and_the_language_runtimes(binaries):
    allowed = re.compile(r"lib(shoal|torch|torch_cpu|torch_python|c10|stdc\+\+|gcc_s|m|c)\.so[.0-9]*|ld-linux[-\w]*\.so\.\d")
    for file in binaries:
        dynamic = run("readelf", "-dW", file)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        assert needed and [name for name in needed if not allowed.fullmatch(name)] == []
        (path,) = re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic)
        assert all(entry.startswith("$ORIGIN/") for entry in path.split(":")), path


@pytest.fixture(scope="session")
def mpi_library(binaries):
    """The wheel's library for the transport mpi."""
    if shutil.which("mpirun") is None:
        pytest.skip("no MPI: the wheel has none either")
    (library,) = binaries[1].parent.glob("libshoal_mpi.so")
    return library


def test_PY09_mpi_is_loaded_when_it_is_asked_for(environment, mpi_library, tmp_path):
    python, bare, clean = environment
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", mpi_library))
    assert sum(name.startswith("libmpi.so") for name in needed) == 1, needed
    assert re.search(r"mpi +yes", run(python, "-m", "shoal", "doctor", env=bare))
    program = tmp_path / "short.py"
    program.write_text(OVER_MPI)
    env = clean | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    said = run(shutil.which("mpirun"), "-n", 2, python, program, env=env)
    assert said.count("learned mpi") == 2, said


def test_PY09_a_machine_without_mpi_is_told_so_and_has_the_other_transports(environment, mpi_library, tmp_path):
    python, bare, _ = environment
    whole = mpi_library.read_bytes()
    assert whole.count(b"libmpi.so.") == 1
    mpi_library.write_bytes(whole.replace(b"libmpi.so.", b"libnot.so."))
    try:
        program = tmp_path / "short.py"
        start = [str(part) for part in (python, "-m", "shoal", "launch", "-n", 2, "--", python, program)]
        program.write_text(SHORT)
        assert run(*start, env=bare).count("learned host") == 2
        told = run(python, "-m", "shoal", "doctor", env=bare)
        assert "libnot.so." in told and "install Open MPI" in told, told
        program.write_text(OVER_MPI)
        asked = subprocess.run(start, env=bare, capture_output=True, text=True, timeout=100, check=False)
        assert asked.returncode != 0
        assert "transport mpi: libnot.so." in asked.stderr and "install Open MPI" in asked.stderr, asked.stderr
    finally:
        mpi_library.write_bytes(whole)


def test_PY09_binaries_built_on_an_old_system_run_on_newer_ones(binaries):
    def version(text):
        return tuple(int(part) for part in text.split("."))

    if version(platform.libc_ver()[1]) > (2, 36):
        pytest.skip("built with a C library later than that of Debian 12")
    for file in binaries:
        symbols = run("readelf", "-VW", file)
        assert max(map(version, re.findall(r"\bGLIBC_([0-9.]+)", symbols))) <= (2, 35)
        assert max(map(version, re.findall(r"\bGLIBCXX_([0-9.]+)", symbols))) <= (3, 4, 30)


def test_PY09_the_sdist_has_what_a_build_needs_and_no_more(wheel, tmp_path):
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=REPOSITORY)
    (packed,) = tmp_path.glob("shoal-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path)  # our own; older releases of 3.11 know no filter
    sources = packed.with_suffix("").with_suffix("")
    tops = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "cmake", "include", "src", "python"}
    assert {entry.name for entry in sources.iterdir()} == tops
    assert packed.stat().st_size < 2 << 20
    # What pyproject.toml asks of CMake; a build would take as long as that of the library.
    options = ["-DSHOAL_BUILD_TESTS=OFF", "-DSHOAL_BUILD_BENCH=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-G", "Ninja", "-S", sources, "-B", tmp_path / "build", *options)
    plan = run("ninja", "-C", tmp_path / "build", "-t", "commands", "wheel_files")
    mpi = "loaded_mpi" if shutil.which("mpicxx") else "no_mpi"
    assert "-o wheel/shoal " in plan and f"{mpi}.cpp" in plan, plan


def test_PY09_another_torch_is_refused_with_both_versions(environment):
    python, bare, _ = environment
    code = "import torch; torch.__version__ = '9.9.1'\nimport shoal"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=bare, timeout=100)
    assert done.returncode != 0 and "but torch 9.9.1 is installed" in done.stderr


def test_PY09_an_extension_that_does_not_load_is_an_error_that_says_what_it_was_built_for(tmp_path, monkeypatch):
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(BUILD / "python" / "shoal" / "_load.py", folder)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="Python files alone: install the wheel"):
        importlib.import_module("without._load")
    shutil.copy(BUILD / "python" / "shoal" / "_version.py", folder)
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=r"built for torch 2\S+ does not load in Python 3\.\d+ with torch 2\S+ .*'_C'"):
        importlib.import_module("without._load")


def test_PY09_a_cpp_program_builds_against_the_wheel(environment, tmp_path):
    python, _, clean = environment
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("no compiler")
    (tmp_path / "CMakeLists.txt").write_text(
        textwrap.dedent(
            """
            cmake_minimum_required(VERSION 3.25)
            project(user LANGUAGES CXX)
            find_package(shoal REQUIRED)
            add_executable(user main.cpp)
            target_link_libraries(user PRIVATE shoal::shoal)
            """
        )
    )
    (tmp_path / "main.cpp").write_text(
        "#include <shoal/world.h>\n"
        "int main() { auto world = shoal::init(); world.print0(\"ranks\", world.all_reduce(1)); }\n"
    )
    prefix = run(python, "-m", "shoal", "cmake-dir", env=clean).strip()
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", env=clean)
    run("cmake", "--build", tmp_path / "build", env=clean)
    launched = run(python, "-m", "shoal", "launch", "-n", 2, "--", tmp_path / "build" / "user", env=clean)
    assert "ranks 2" in launched
