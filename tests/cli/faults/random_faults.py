#!/usr/bin/env python3
"""Random faults in training, as often as asked: nothing hangs, no process or shared file stays, checkpoints verify.

    tests/cli/faults/random_faults.py build/shoal --faults 500 --seed 1

Each fault is a job of `shoal train` that saves while it runs; at a random moment something is done to one of its ranks or
to its launcher. A fault's number and the seed give the same job, fault and moment again (--only NUMBER). Numbers that
follow each other go through all kinds of faults and all strategies; --first lets several of these programs share them.
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
RENDEZVOUS = 60  # that ranks wait for each other at the start, seconds
DEADLINE = 3 * TIMEOUT + GRACE + 20  # from the fault to the launcher's end; the rest is for a busy machine
START = 120  # until a rank is there, or a checkpoint has been read, on a busy machine; seconds
GO_ON = ("decentralized", "hybrid_gossip", "local")  # whose ranks do not wait for one that is gone


def strategies(shoal):
    text = subprocess.run([shoal, "train", "--help"], capture_output=True, text=True, check=True).stdout
    listed = re.search(r"--strategy TEXT=ddp\s+(.*)", text).group(1)
    names = [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",")]
    return [name for name in names if name not in ("", "none")]  # none: without shoal


def processes_of(folder):
    """The job's processes with their ranks (None: not a rank's); its folder stands in the environment of all of them."""
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
        if alive and environment.get("TMPDIR") == str(folder / "temporary"):
            forked = (entry / "comm").read_text().strip().partition("shoal-rank-")[2]  # its environment is the launcher's
            found[int(entry.name)] = forked or environment.get("RANK")
    return found


def wait_until(condition, seconds):
    """What the condition gives at last."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


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


# What is done to a rank; whether that rank is gone then, and must be named; whether the job goes on, if only perhaps.
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


class Fault:
    """What the number stands for."""

    def __init__(self, names, seed, number):
        chance = random.Random(f"{seed}/{number}")
        self.kind = list(FAULTS)[number % len(FAULTS)]
        self.strategy = names[(seed + number) % len(names)]
        self.transport = chance.choice(["host", "gloo"])
        self.ranks = 4 if self.strategy == "hybrid_gossip" else chance.choice([2, 3, 4])
        self.victim = chance.randrange(self.ranks)
        self.moment = chance.uniform(0, 4)
        self.title = (f"{number}: {self.kind}, {self.strategy} over {self.transport}, rank {self.victim} of {self.ranks}, "
                      f"after {self.moment:.2f} s")

    def command(self, shoal, folder):
        line = [shoal, "train", "--model", "mlp", "--size", "tiny", "--data", "reference", "--strategy", self.strategy,
                "--ranks", str(self.ranks), "--transport", self.transport, "--timeout", str(TIMEOUT), "--steps", "1000000",
                "--save", str(folder / "run"), "--metrics", str(folder / "metrics")]
        if self.strategy == "hybrid_gossip":
            line += ["--topology-local-size", "2"]
        if self.strategy != "local":  # it has no checkpoints
            line += ["--save-every", "50", "--keep-last", "3"]
        return line


def disturb(fault, launcher, folder):
    """Does it, and sees the job to its end. What went wrong, as lines."""
    def victim():
        return [pid for pid, rank in processes_of(folder).items() if rank == str(fault.victim)]

    wait_until(lambda: launcher.poll() is not None or victim(), START)
    time.sleep(fault.moment)
    pids = victim()
    if not pids:
        return [f"rank {fault.victim} was not there"]
    act, _, goes_on = FAULTS[fault.kind]
    deadline = DEADLINE + (0 if (folder / "metrics").exists() else RENDEZVOUS)
    try:
        act(pids[0], launcher)
    except ProcessLookupError:
        pass
    if goes_on or fault.strategy in GO_ON:
        time.sleep(2)
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
    wrong = []
    if not wait_until(lambda: launcher.poll() is not None, deadline):
        wrong.append(f"the launcher has not ended {deadline} s after the fault")
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not processes_of(folder), GRACE)
    for pid, rank in processes_of(folder).items():
        wrong.append(f"process {pid} of rank {rank} is left")
        os.kill(pid, signal.SIGKILL)
    return wrong


def run_fault(shoal, fault, folder):
    """What went wrong, as lines."""
    before = shared_files()
    (folder / "temporary").mkdir()
    with open(folder / "output", "w+") as output:
        launcher = subprocess.Popen(
            fault.command(shoal, folder), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True, env=dict(os.environ, TMPDIR=str(folder / "temporary")),
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # nohup's would be respected
        try:
            wrong = disturb(fault, launcher, folder)
        finally:
            if launcher.poll() is None:
                launcher.kill()
        output.seek(0)
        text = output.read()
    if FAULTS[fault.kind][1] and not re.search(rf"ranks? (\d+, )*{fault.victim}\b", text):
        wrong.append(f"nobody names rank {fault.victim}")
    if stays := shared_files() - before:
        wrong.append(f"shared files are left: {sorted(stays)}")
    if stays := [entry.name for entry in (folder / "temporary").iterdir()]:
        wrong.append(f"temporary files are left: {sorted(stays)}")
    for checkpoint in sorted((folder / "run").glob("step-*")):
        verified = subprocess.run([shoal, "checkpoint", "verify", str(checkpoint)], capture_output=True, text=True,
                                  timeout=START)
        if verified.returncode != 0:
            wrong.append(f"{checkpoint.name}: {verified.stderr.strip() or verified.stdout.strip()}")
    return wrong


def keep_to_oneself():
    """Other programs' files in /dev/shm come and go; root can have such a folder of its own."""
    mark, unshared = "SHOAL_FAULTS_TO_ONESELF", ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh"]
    if mark in os.environ or os.geteuid() != 0 or not shutil.which("unshare"):
        return
    os.environ[mark] = "1"
    if subprocess.run([*unshared, "true"], capture_output=True).returncode == 0:
        os.execvp(unshared[0], [*unshared, sys.executable, *sys.argv])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shoal", help="the program")
    parser.add_argument("--faults", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these alone")
    options = parser.parse_args()
    keep_to_oneself()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the job with it
    names = strategies(options.shoal)
    failed = 0
    for number in options.only or range(options.first, options.first + options.faults):
        fault = Fault(names, options.seed, number)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="shoal-faults-"))
        began = time.monotonic()
        wrong = run_fault(options.shoal, fault, folder)
        print(f"{fault.title} - {'; '.join(wrong) if wrong else 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
        if not wrong:
            shutil.rmtree(folder)
            continue
        failed += 1
        print(f"  output: {folder}/output", flush=True)
    print(f"{failed} faults went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
