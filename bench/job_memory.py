"""Memory of whole jobs, each page counted once: what ranks share over shared memory is in the resident memory of each.

    python bench/job_memory.py --shoal build/shoal [--strategies local zero2 ...] [--model gpt --size small --ranks 2]
                               [--peer-script PEERS --peer-python PYTHON --peers local fairscale_sddp ...]

Runs each job in a memory cgroup of its own, and samples its anonymous and shared memory (memory.stat) until it ends. A row
gives the median over rounds of the peak, in MiB per rank, and its difference to the first job of the same program, which
should be `local`: whatever Python or libtorch take for themselves is in both. Needs root, on Linux.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

SECONDS_BETWEEN_SAMPLES = 0.004


def new_cgroup():
    """(folder, names of anonymous and of shared memory in its memory.stat), under cgroup v1 or v2."""
    for root, names in (("/sys/fs/cgroup/memory", ("total_rss", "total_shmem")), ("/sys/fs/cgroup", ("anon", "shmem"))):
        if not os.path.exists(os.path.join(root, "cgroup.procs")):
            continue
        folder = tempfile.mkdtemp(prefix="shoal-memory-", dir=root)
        if os.path.exists(os.path.join(folder, "memory.stat")):
            return folder, names
        os.rmdir(folder)
        sys.exit(f"cgroups in {root} do not count memory: echo +memory > {root}/cgroup.subtree_control")
    sys.exit("no memory cgroup is mounted at /sys/fs/cgroup")


def remove(folder):
    """Once the last process of the job has ended, such as the one that watches its launcher."""
    for _ in range(100):
        try:
            return os.rmdir(folder)
        except OSError:
            time.sleep(0.05)
    sys.exit(f"{folder}: a process of the job does not end")


def peak_mib(command):
    """Peak of a job's memory, and the part of it that is shared between processes."""
    folder, names = new_cgroup()
    try:
        return [value / 2**20 for value in peak_in(folder, names, command)]
    finally:
        remove(folder)


def peak_in(folder, names, command):
    """peak_mib() of a job in this cgroup, in bytes."""
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    peak = (0, 0)
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(["sh", "-c", enter, folder, *command], stdout=output, stderr=subprocess.STDOUT) as job:
            while job.poll() is None:
                with open(os.path.join(folder, "memory.stat"), encoding="ascii") as file:
                    values = dict(line.split() for line in file)
                anonymous, shared = (int(values[name]) for name in names)
                peak = max(peak, (anonymous + shared, shared))
                time.sleep(SECONDS_BETWEEN_SAMPLES)
        output.seek(0)
        if job.returncode != 0:
            sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{output.read()[-2000:]}")
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True, help="the program")
    parser.add_argument("--strategies", nargs="*", default=["local", "ddp", "zero1", "zero2", "megatron", "fsdp"])
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-script", help="path of peers.py")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", nargs="*", default=["local", "ddp_view", "zero1_torch", "fairscale_sddp"])
    options = parser.parse_args()
    task = ["--model", options.model, "--size", options.size, "--steps", str(options.steps), "--threads", "1"]
    jobs = {("shoal", name): [options.shoal, "train", *task, "--data", "reference", "--batch", "4", "--optimizer", "adamw",
                              "--ranks", str(options.ranks), "--strategy", name] for name in options.strategies}
    if options.peer_script:
        jobs |= {("peers", name): [options.peer_python, options.peer_script, "--peer", name, *task, "--batch", "4", "--impl",
                                   "fused", "--world", str(options.ranks)] for name in options.peers}
    peaks = {job: [] for job in jobs}
    for _ in range(options.rounds):
        for job, command in jobs.items():
            peaks[job].append([value / options.ranks for value in peak_mib(command)])
    print("| | job | MiB per rank | of that shared | beside local |\n| --- | --- | --- | --- | --- |")
    local = {}
    for (program, name), rounds in peaks.items():
        whole, shared = (statistics.median(column) for column in zip(*rounds))
        print(f"| {program} | {name} | {whole:.0f} | {shared:.0f} | {whole - local.setdefault(program, whole):+.0f} |")


if __name__ == "__main__":
    main()
