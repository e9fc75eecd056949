"""Rates of saving and loading checkpoints beside the disk's own and torch.distributed.checkpoint's.

    python bench/checkpoints.py --build build --folder FOLDER

Prints a table, all of one run, taken in turns: the same bytes written with dd conv=fsync and read with dd; by shoal;
and by torch.distributed.checkpoint in Python, which syncs its files but not their folder and has no checksums. Of each
program the second time counts. Files leave the page cache before they are read. FOLDER is on the disk that is to be measured.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time


def forget(folder):
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(act):
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def disk(options):
    folder = os.path.join(options.folder, "dd")
    os.makedirs(folder)
    file = os.path.join(folder, "file")
    dd = lambda *words: subprocess.run(["dd", "bs=1M", *words], check=True, capture_output=True)
    save = timed(lambda: dd("if=/dev/zero", "of=" + file, f"count={options.mib}", "conv=fsync"))
    forget(folder)
    load = timed(lambda: dd("if=" + file, "of=/dev/null"))
    shutil.rmtree(folder)
    return {"save": save, "load": load}


def shoal(options, ranks):
    folder = os.path.join(options.folder, f"shoal{ranks}")
    build = pathlib.Path(options.build)
    text = subprocess.run([build / "shoal", "launch", "--ranks", str(ranks), "--threads", "1", "--", build / "bench_checkpoint", folder,
                           str(options.mib), "2"], check=True, capture_output=True, text=True).stdout
    shutil.rmtree(folder)
    result = json.loads(next(line[line.index("{"):] for line in text.splitlines() if '{"copy"' in line))
    return {key: values[-1] for key, values in result.items()}


def distributed_checkpoint(options, ranks, rank, out):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    folder = os.path.join(options.folder, f"dcp{ranks}")
    torch.set_num_threads(1)  # as shoal's ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    make = lambda: {f"tensor{i}": distribute_tensor(torch.rand((options.mib << 20) // 64), mesh, [Shard(0)]) for i in range(16)}
    state, into = make(), make()

    def together(act):
        dist.barrier()
        return timed(lambda: (act(), dist.barrier()))

    for i in range(2):
        path, result = f"{folder}/{i}", {}
        result["save"] = together(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)))
        forget(path)
        result["load"] = together(lambda: dcp.load(into, checkpoint_id=path))
        assert all(torch.equal(state[name].to_local(), into[name].to_local()) for name in state)
    if rank == 0:
        os.write(out, json.dumps(result).encode())
    dist.barrier()
    dist.destroy_process_group()


def python(options, ranks):
    """Ranks forked from one process that has loaded everything."""
    inner, outer = os.pipe()
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                distributed_checkpoint(options, ranks, rank, outer)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in children):
        sys.exit("torch.distributed.checkpoint failed")
    shutil.rmtree(os.path.join(options.folder, f"dcp{ranks}"))
    pathlib.Path(options.folder, f"dcp{ranks}.meeting").unlink(missing_ok=True)
    return json.loads(os.read(inner, 1 << 16))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    options.folder = os.path.abspath(options.folder)
    os.makedirs(options.folder)
    import torch.distributed.checkpoint  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    what = [("dd", 1, lambda: disk(options))]
    for ranks in options.ranks:
        what.append(("shoal", ranks, lambda ranks=ranks: shoal(options, ranks)))
        what.append(("torch.distributed.checkpoint", ranks, lambda ranks=ranks: python(options, ranks)))
    rows = {}
    try:
        for _ in range(options.rounds):
            for name, ranks, measure in what:
                row = rows.setdefault((name, ranks), {})
                for key, seconds in measure().items():
                    row.setdefault(key, []).append(seconds)
    finally:
        shutil.rmtree(options.folder)
    rate = lambda seconds: options.mib / statistics.median(seconds)
    print(f"{options.mib} MiB, {options.rounds} rounds; medians (best)\n")
    print("| by | ranks | save, MiB/s | x dd | load, MiB/s | x dd |\n| --- | --- | --- | --- | --- | --- |")
    for (name, ranks), row in rows.items():
        cells = [f"{rate(row[key]):.0f} ({options.mib / min(row[key]):.0f}) | {rate(row[key]) / rate(rows['dd', 1][key]):.2f}"
                 for key in ("save", "load")]
        print(f"| {name} | {ranks} | {' | '.join(cells)} |")
    print()
    for ranks in options.ranks:
        row, peer = rows["shoal", ranks], rows["torch.distributed.checkpoint", ranks]
        stall, copy = (statistics.median(row[key]) for key in ("stall", "copy"))
        print(f"{ranks} ranks: save_async stalls {1000 * stall:.1f} ms, {stall / copy:.2f} x memcpy ({1000 * copy:.1f} ms); beside "
              f"torch.distributed.checkpoint save x {rate(row['save']) / rate(peer['save']):.2f}, "
              f"load x {rate(row['load']) / rate(peer['load']):.2f}")


if __name__ == "__main__":
    main()
