"""PY08, PY09: the wheel, in a fresh virtual environment without a compiler's help and without MPI."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM = """
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
print("learned" if loss.item() < 0.2 * first else "failed", shoal.distributed.group_of().transport, flush=True)
dist.destroy_process_group()
"""


def run(*command, **options):
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The Python of a fresh virtual environment with the wheel; PyTorch comes from this one, so that nothing is downloaded."""
    wheels = sorted(REPOSITORY.glob("dist/shoal-*.whl"), key=os.path.getmtime)
    if not wheels:
        pytest.skip("no wheel in dist/: make wheel")
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", env=clean).strip())
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not (packages / entry.name).exists() and not entry.name.startswith(("shoal", "__editable__")):
            (packages / entry.name).symlink_to(entry)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheels[-1], env=clean)
    return python, clean, wheels[-1]


def test_PY09_the_wheel_is_small_and_names_its_torch(environment):
    wheel = environment[2]
    assert wheel.stat().st_size < 10 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "Requires-Dist: torch==" + torch.__version__.split("+")[0] in metadata
    for part in ("shoal/lib/libshoal.so", "shoal/bin/shoal", "shoal/include/shoal/shoal.h", "lib/cmake/shoal/shoalConfig.cmake"):
        assert any(part in name for name in names), part


def test_PY09_the_wheel_trains_on_two_ranks(environment, tmp_path):
    python, clean, _ = environment
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    torchrun = run(python, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", program, env=clean)
    assert torchrun.count("learned host") == 2
    launched = run(python, "-m", "shoal", "launch", "-n", 2, "--", python, program, env=clean)
    assert launched.count("learned host") == 2


def test_PY08_doctor_and_the_program_run(environment):
    python, clean, _ = environment
    assert "two ranks on this host communicate over: host" in run(python, "-m", "shoal", "doctor", env=clean)
    assert "shoal" in run(python, "-m", "shoal", "--version", env=clean)


def test_PY09_libraries_need_no_mpi(environment):
    python, clean, _ = environment
    package = Path(run(python, "-c", "import shoal; print(shoal.__path__[0])", env=clean).strip())
    for file in [*package.glob("_C*.so"), *package.glob("lib/libshoal.so"), package / "bin" / "shoal"]:
        needed = run("readelf", "-d", file)
        assert not any(word in needed for word in ("libmpi", "libcrypto", "libz.so")), needed


def test_PY09_another_torch_is_refused_with_both_versions(environment):
    python, clean, _ = environment
    code = "import torch; torch.__version__ = '9.9.1'\nimport shoal"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=clean, timeout=100)
    assert done.returncode != 0 and "but torch 9.9.1 is installed" in done.stderr


def test_PY09_a_cpp_program_builds_against_the_wheel(environment, tmp_path):
    python, clean, _ = environment
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
