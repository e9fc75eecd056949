#!/usr/bin/env python3
"""Random faults in training, as often as asked: nothing hangs, no process or shared file stays, checkpoints verify.

    tests/cli/random_faults.py build/shoal --faults 500 --seed 1

Each fault is a job of `shoal train` that saves while it runs; at a random moment something is done to one of its ranks or
to its launcher. A fault's number and the seed give the same job, fault and moment again (--only NUMBER).
"""
import argparse
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TIMEOUT = 6  # of an operation, seconds
GRACE = 10  # of ranks that were asked to end, seconds
DEADLINE = 3 * TIMEOUT + GRACE + 20  # from the fault to the launcher's end; the rest is for a busy machine


def strategies(shoal):
    text = subprocess.run([shoal, "train", "--help"], capture_output=True, text=True, check=True).stdout
    listed = re.search(r"--strategy TEXT=ddp\s+(.*)", text).group(1)
    names = [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",")]
    return [name for name in names if name not in ("", "none")]  # none: without shoal


def ranks_of(job):
    """Processes of the launcher `job` (its SHOAL_JOB) by rank; -1: no rank."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = dict(pair.split("=", 1) for pair in (entry / "environ").read_bytes().decode(
                errors="replace").split("\0") if "=" in pair)
            alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (OSError, IndexError):
            continue
        if alive and environment.get("SHOAL_JOB", "").startswith(job):
            found.setdefault(int(environment.get("RANK", -1)), []).append(int(entry.name))
    return found


def job_of(launcher):
    """The SHOAL_JOB that the launcher gave its ranks, as soon as one is there; none: it has ended."""
    while launcher.poll() is None:
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        for child in children.read_text().split() if children.exists() else []:
            try:
                environment = pathlib.Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "RANK=" in environment and (found := re.search(r"SHOAL_JOB=([^\0]+)", environment)):
                return found.group(1)
        time.sleep(0.02)
    return None


def limit(which, value):
    return lambda pid, launcher: resource.prlimit(pid, which, (value(pid), value(pid)))


def signalled(number):
    return lambda pid, launcher: os.kill(pid, number)


def mapped(pid):
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def stop_and_continue(pid, launcher):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)


# What is done to a rank; whether that rank is gone then, and the others must name it; whether the job goes on.
FAULTS = {
    "kill": (signalled(signal.SIGKILL), True, False),
    "segv": (signalled(signal.SIGSEGV), True, False),
    "stop": (signalled(signal.SIGSTOP), True, False),
    "stop and continue": (stop_and_continue, False, True),
    "address space": (limit(resource.RLIMIT_AS, mapped), False, True),
    "descriptors": (limit(resource.RLIMIT_NOFILE, lambda pid: 3), False, True),
    "TERM to the launcher": (lambda pid, launcher: launcher.send_signal(signal.SIGTERM), False, False),
    "HUP to the launcher": (lambda pid, launcher: launcher.send_signal(signal.SIGHUP), False, False),
    "launcher killed": (lambda pid, launcher: launcher.kill(), False, False),
}


def shared_files():
    return {entry.name for entry in pathlib.Path("/dev/shm").iterdir()}


def run_fault(shoal, names, seed, number):
    """What went wrong, as lines."""
    chance = random.Random(f"{seed}/{number}")
    strategy, transport = chance.choice(names), chance.choice(["host", "gloo"])
    fault, ranks, moment = chance.choice(list(FAULTS)), chance.choice([2, 3, 4]), chance.uniform(0, 4)
    act, gone, goes_on = FAULTS[fault]
    title = f"{number}: {fault}, {strategy} over {transport}, {ranks} ranks, after {moment:.2f} s"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="shoal-faults-"))
    before = shared_files()
    output = open(folder / "output", "w+")
    launcher = subprocess.Popen(
        [shoal, "train", "--model", "mlp", "--size", "tiny", "--data", "reference", "--strategy", strategy, "--ranks",
         str(ranks), "--transport", transport, "--timeout", str(TIMEOUT), "--steps", "1000000", "--save",
         str(folder / "run"), "--save-every", "50", "--keep-last", "3"],
        stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
    wrong, victim = [], chance.randrange(ranks)
    try:
        job = job_of(launcher)
        if job is None:
            return title, ["the job ended by itself"], folder
        time.sleep(moment)
        pids = ranks_of(job).get(victim, [])
        if not pids:
            return title, [f"rank {victim} was not there"], folder
        try:
            act(pids[0], launcher)
        except ProcessLookupError:
            pass
        began = time.monotonic()
        if goes_on:
            time.sleep(2)
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
        while launcher.poll() is None and time.monotonic() - began < DEADLINE:
            time.sleep(0.05)
        if launcher.poll() is None:
            wrong.append(f"the launcher has not ended {DEADLINE} s after the fault")
            launcher.send_signal(signal.SIGTERM)
            launcher.send_signal(signal.SIGTERM)
        while (left := ranks_of(job)) and time.monotonic() - began < DEADLINE:
            time.sleep(0.05)
        if left:
            wrong.append(f"processes are left: {left}")
            for pid in sum(left.values(), []):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    finally:
        if launcher.poll() is None:
            launcher.kill()
    output.seek(0)
    text = output.read()
    if gone and not re.search(rf"ranks? (\d+, )*{victim}\b", text):
        wrong.append(f"nobody names rank {victim}")
    if stays := shared_files() - before:
        wrong.append(f"shared files are left: {sorted(stays)}")
    for checkpoint in (folder / "run").glob("step-*"):
        verified = subprocess.run([shoal, "checkpoint", "verify", str(checkpoint)], capture_output=True, text=True)
        if verified.returncode != 0:
            wrong.append(f"{checkpoint.name}: {verified.stderr.strip() or verified.stdout.strip()}")
    return title, wrong, folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shoal", help="the program")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one fault")
    options = parser.parse_args()
    names = strategies(options.shoal)
    failed = 0
    for number in [options.only] if options.only is not None else range(options.faults):
        title, wrong, folder = run_fault(options.shoal, names, options.seed, number)
        print(title, "-", "; ".join(wrong) if wrong else "ok", flush=True)
        if not wrong:
            shutil.rmtree(folder)
            continue
        failed += 1
        print(f"  output: {folder}/output", flush=True)
    print(f"{failed} faults went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
