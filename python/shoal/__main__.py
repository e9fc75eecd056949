"""python -m shoal COMMAND: the program `shoal` of the package, and what only Python knows.

    python -m shoal doctor       what this installation consists of, whether two ranks can communicate, and the program's report
    python -m shoal cmake-dir    folder for CMAKE_PREFIX_PATH, so that find_package(shoal) finds the C++ library
    python -m shoal ...          everything else goes to the program: launch, train, plan, flight, --help
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def _installed() -> Path:
    """The package's folder where the extension lies: in a build tree the Python files are links."""
    from . import _C

    return Path(_C.__file__).parent


def cmake_dir() -> str:
    """Folder for CMAKE_PREFIX_PATH."""
    for folder in (_installed(), PACKAGE):
        if list(folder.glob("lib*/cmake/shoal/shoalConfig.cmake")):
            return str(folder)
    raise SystemExit("shoal: this is a build tree, which has no files for CMake; install the wheel, or cmake --install")


def _program() -> str:
    for path in (_installed() / "bin" / "shoal", _installed().parent.parent / "shoal"):
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    raise SystemExit("shoal: the program is not beside the package; build the target shoal_cli")


def _rank(rank: int, store: str, pipe) -> None:
    import torch
    import torch.distributed as dist

    from . import distributed

    try:
        dist.init_process_group("shoal", init_method=f"file://{store}", rank=rank, world_size=2)
        tensor = torch.full((1000,), rank + 1.0)
        dist.all_reduce(tensor)
        if tensor.unique().tolist() != [3.0]:
            raise RuntimeError("the sum over two ranks is wrong")
        pipe.send(f"two ranks on this host communicate over: {distributed.group_of().transport}")
        dist.destroy_process_group()
    except Exception as error:  # told by the caller
        pipe.send(f"FAILED: {error}")


def doctor() -> int:
    """Prints what this installation consists of, and what the program says of the machine; 1 if ranks cannot communicate."""
    import multiprocessing
    import subprocess
    import tempfile

    import torch

    from . import _version

    print(f"shoal {_version.version}, built for torch {_version.torch}; installed torch {torch.__version__}")
    print(f"python {sys.version.split()[0]}, {sys.executable}")
    print(f"package {_installed()}")
    try:
        shared = f"{shutil.disk_usage('/dev/shm').free >> 20} MiB"
    except OSError:
        shared = "no /dev/shm, which shoal does not need"
    print(f"processors {len(os.sched_getaffinity(0))}, free shared memory {shared}")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(context.Process(target=_rank, args=(rank, folder + "/store", theirs)))
            ranks[-1].start()
            pipes.append(ours)
        answers = [pipe.recv() if pipe.poll(30) else "FAILED: no answer within 30 s" for pipe in pipes]
        for process in ranks:
            process.join(5)
            process.kill()
    print("\n".join(sorted(set(answers))), flush=True)
    reported = subprocess.run([_program(), "doctor"], check=False).returncode
    return int(any(answer.startswith("FAILED") for answer in answers) or reported != 0)


def program() -> int:
    """The command `shoal`."""
    arguments = sys.argv[1:]
    if arguments == ["doctor"]:  # with options, the program's own report
        return doctor()
    if arguments[:1] == ["cmake-dir"]:
        print(cmake_dir())
        return 0
    path = _program()
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    sys.exit(program())
