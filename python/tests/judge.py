"""PyTorch's own tests of torch.distributed (distributed_test.py, in the wheel), run on a backend.

    python judge.py shoal --out shoal.json [--only REGEX] [--ranks 3]
    python judge.py gloo --out gloo.json
    python judge.py --compare shoal.json gloo.json      counts, and the tests that shoal fails

Each test has processes of its own, forked from this one. A test that asks which backend it runs on is told that shoal can
do what Gloo can: the file's comparisons with "gloo" also hold for "shoal".
"""

import argparse
import atexit
import collections
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from datetime import timedelta

REPLACEMENTS = (
    ('BACKEND != "gloo"', 'BACKEND not in ("gloo", "shoal")'),
    ('BACKEND == "gloo"', 'BACKEND in ("gloo", "shoal")'),
    ('is_available({"gloo"})', 'is_available({"gloo", "shoal"})'),
    ("    dist.Backend.GLOO,\n", "    dist.Backend.GLOO, 'shoal',\n"),
)

# Their groups wait one second in all, also for each other: a busy machine may pause a rank for longer. They have three tries.
SHORT_OF_TIME = ("test_barrier_timeout_global", "test_barrier_timeout_full_group")


def prepare(backend, ranks):
    folder = tempfile.mkdtemp(prefix="judge")
    atexit.register(shutil.rmtree, folder)
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, "lockfile"), "w"):
        pass
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        TEMP_DIR=folder, PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    warnings.filterwarnings("ignore")


def load(backend):
    """The module with the tests."""
    import torch

    torch.set_num_threads(1)
    if backend != "shoal":
        from torch.testing._internal.distributed import distributed_test

        return distributed_test
    import shoal  # noqa: F401: registers the backend
    import torch.testing._internal.distributed as place
    from torch.testing._internal import common_distributed

    for backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("shoal")
    common_distributed.DistTestCases.backend_feature["plugin"].add("shoal")
    with open(os.path.join(place.__path__[0], "distributed_test.py")) as file:
        text = file.read()
    for before, after in REPLACEMENTS:
        text = text.replace(before, after)
    module = types.ModuleType("distributed_test_on_shoal")
    module.__file__ = module.__name__ + ".py"
    sys.modules[module.__name__] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def suite(module, barrier, limit):
    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            pass

        def tearDown(self):
            pass

        def _barrier(self, *arguments, **options):
            barrier.wait(limit)

    return Tests


def run_rank(module, name, rank, barrier, where, arguments, port):
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    log = os.open(where + ".log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(arguments.limit - 5)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    try:
        test = suite(module, barrier, arguments.limit)(name)
        test.rank, test.file_name = rank, os.path.join(os.path.dirname(where), "store")
        dist.init_process_group(
            init_method="file://" + test.file_name, backend=arguments.backend, world_size=arguments.ranks, rank=rank,
            timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, 40)),
        )
        barrier.wait(arguments.limit)
        getattr(test, name)()
        barrier.wait(arguments.limit)
        dist.destroy_process_group()
        result = ("pass", "")
    except unittest.SkipTest as skip:
        result = ("skip", str(skip))
    except SystemExit as end:
        if not end.code:
            result = ("pass", "")
        else:
            result = ("skip", skips[end.code]) if end.code in skips else ("fail", f"exit code {end.code}")
    except BaseException:
        result = ("fail", traceback.format_exc()[-3000:])
        barrier.abort()
    with open(where, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)


def outcome_of(where, code):
    """What a rank reported, or how it ended without a report."""
    try:
        with open(where) as file:
            return tuple(json.load(file))
    except (OSError, ValueError):
        pass
    try:
        with open(where + ".log") as file:
            text = file.read()
            text = text if len(text) < 16000 else text[:8000] + "\n...\n" + text[-8000:]
    except OSError:
        text = ""
    return ("hang" if code is None else "crash", text)


def write_native_stacks(pid, where):
    """What every thread of a rank that hangs is doing."""
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 12"]
    with open(where, "a") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            file.write("gdb did not end\n")


def run_test(module, name, port, arguments):
    barrier = multiprocessing.Barrier(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(arguments.ranks):
            pid = os.fork()
            if pid == 0:
                run_rank(module, name, rank, barrier, f"{folder}/{rank}", arguments, port)
            pids.append(pid)
        codes = {}
        end = time.monotonic() + arguments.limit
        while len(codes) < len(pids) and time.monotonic() < end:
            for pid in set(pids) - set(codes):
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = code
                    if code:  # the others may wait for it
                        end = min(end, time.monotonic() + 15)
            time.sleep(0.005)
        for pid in set(pids) - set(codes):
            if shutil.which("gdb"):
                write_native_stacks(pid, f"{folder}/{pids.index(pid)}.log")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        outcomes = [outcome_of(f"{folder}/{rank}", codes.get(pid)) for rank, pid in enumerate(pids)]
    bad = [each for each in outcomes if each[0] not in ("pass", "skip")]
    # A broken barrier is the echo of another rank's failure.
    bad = [each for each in bad if "BrokenBarrierError" not in each[1]] or bad
    if bad:
        return bad[0]
    return next((each for each in outcomes if each[0] == "skip"), ("pass", ""))


def last_line(text):
    return next((line[:200] for line in reversed(text.splitlines()) if line.strip()), "")


def count(results):
    return dict(sorted(collections.Counter(verdict for verdict, _ in results.values()).items()))


def compare(ours, theirs):
    with open(ours) as file:
        ours = json.load(file)
    with open(theirs) as file:
        theirs = json.load(file)
    print("shoal", count(ours))
    print("gloo ", count(theirs))
    for name, (verdict, text) in sorted(ours.items()):
        if verdict not in ("pass", "skip"):
            print(f"{name}: {verdict} (gloo: {theirs.get(name, ['not run'])[0]}): {last_line(text)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", choices=("shoal", "gloo"))
    parser.add_argument("--out")
    parser.add_argument("--only", default=".", help="regular expression for names of tests")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one test")
    parser.add_argument("--at-least", type=int, help="fail if fewer tests pass")
    parser.add_argument("--compare", nargs=2, metavar=("SHOAL", "GLOO"))
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.compare)
    prepare(arguments.backend, arguments.ranks)
    module = load(arguments.backend)
    names = sorted(
        name for name in dir(module.DistributedTest._DistTestBase)
        if name.startswith("test") and re.search(arguments.only, name)
    )
    results, begin = {}, time.monotonic()
    port = 20000 + os.getpid() % 20000
    for name in names:
        start = time.monotonic()
        for _ in range(3 if name in SHORT_OF_TIME else 1):
            port += 3
            results[name] = run_test(module, name, port, arguments)
            if results[name][0] in ("pass", "skip"):
                break
        if results[name][0] != "skip":
            print(f"{name:<75} {results[name][0]} {time.monotonic() - start:.2f}", flush=True)
        if results[name][0] in ("hang", "crash"):
            print(results[name][1], flush=True)
        elif results[name][0] == "fail":
            print("    " + last_line(results[name][1]), flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump(results, file, indent=1)
    counted = count(results)
    print(arguments.backend, counted, f"of {len(names)} in {time.monotonic() - begin:.0f} s")
    if arguments.at_least is not None and counted.get("pass", 0) < arguments.at_least:
        sys.exit(f"only {counted.get('pass', 0)} tests pass; the gate is {arguments.at_least}")


if __name__ == "__main__":
    main()
