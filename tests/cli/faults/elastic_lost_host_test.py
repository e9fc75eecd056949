"""Loses one of three hosts of an elastic job under shoal launch --nnodes: the others go on without it, or say why not.

    python elastic_lost_host_test.py SHOAL cut|heal|blip|kill|replace LOST_HOST STRATEGY

After `replace`, the host joins the job again with shoal launch --join. With `heal` the network is whole again once the others go
on without the host, which must end all the same. With `blip` it is before that, and nobody is lost.

Host 0 has the job's store: without that the ranks of no host can go on. Needs root; ends with code 77 (skipped) where
network namespaces are not allowed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "support"))
from hosts import Hosts  # noqa: E402

HOSTS, RANKS = 3, 2
SILENCE, TIMEOUT = 2, 6  # seconds
LONGEST = 150  # until all have ended


def lines_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.readlines()
    except FileNotFoundError:
        return []


def lose_a_host(folder):
    shoal, how, lost, strategy = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    # A host that comes again needs a while: over slow links a step takes a quarter of a second, and hardly more processor time.
    steps_in_all, rate = (150, "20mbit") if how == "replace" else (80, "1gbit")
    silence, timeout = (8, 30) if how == "blip" else (SILENCE, TIMEOUT)
    metrics = os.path.join(folder, "metrics.jsonl")
    train = ["--", shoal, "train", "--strategy", strategy, "--model", "mlp", "--data", "reference", "--steps", str(steps_in_all),
             "--threads", "1", "--elastic", "2", "--silent-host-seconds", str(silence), "--timeout", str(timeout),
             "--metrics", metrics]
    with Hosts(HOSTS, rate) as network:
        files = [open(os.path.join(folder, f"host{host}"), "w+", encoding="utf-8") for host in range(HOSTS)]
        processes = []
        for host in range(HOSTS):
            launch = [shoal, "launch", "--nnodes", str(HOSTS), "--node-rank", str(host), "-n", str(RANKS), "--elastic",
                      f"2:{HOSTS * RANKS}", "--address", "10.77.0.1", "--port", "29611"]
            processes.append(network.start(host, 1, launch + train, stdout=files[host], stderr=subprocess.STDOUT))
        begun = time.monotonic()
        while len(lines_of(metrics)) < 20:
            assert time.monotonic() - begun < 60, "the ranks do not train: " + "".join(
                "".join(lines_of(file.name)) for file in files)
            time.sleep(0.05)
        network.cut(lost) if how in ("cut", "heal", "blip") else processes[lost].kill()
        lost_at = time.monotonic()
        if how == "blip":
            time.sleep(1)
            network.mend(lost)
        if how in ("heal", "replace"):
            while not any('"generation"' in line for line in lines_of(metrics)) and time.monotonic() - lost_at < LONGEST:
                time.sleep(0.05)
        if how == "heal":
            network.mend(lost)
        if how == "replace":
            files.append(open(os.path.join(folder, "again"), "w+", encoding="utf-8"))
            again = [shoal, "launch", "--join", "-n", str(RANKS), "--address", "10.77.0.1", "--port", "29611"]
            processes.append(network.start(lost, 1, again + train, stdout=files[-1], stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in processes) and time.monotonic() - lost_at < LONGEST:
            time.sleep(0.05)
        took = time.monotonic() - lost_at
        overdue = [host for host, process in enumerate(processes) if process.poll() is None]
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        texts = ["".join(lines_of(file.name)) for file in files]
        report = f"{took:.1f} s after host {lost} was lost, exit codes {codes}\n" + "\n".join(
            line for text in texts for line in text.splitlines() if not line.startswith("[E"))
        assert not overdue, "not ended: " + report
        if lost == 0:
            for host in (1, 2):
                assert codes[host] != 0 and "which is lost" in texts[host], report
            if how == "cut":
                # A last sign of one of the hosts may be read late: its ranks have then not come.
                said = re.search(r"nothing is heard of the hosts of (.*), and the other ranks are not more than half", texts[0])
                named = re.findall(r"\d+", re.sub(r"\(pid \d+\)", "", said[1])) if said else []
                assert sorted(map(int, named)) == [2, 3, 4, 5], report
        else:
            events = [json.loads(line) for line in lines_of(metrics)]
            changes = [event for event in events if "generation" in event]
            gone = {rank for change in changes for rank in change["lost"]}
            left = [host for host in range(HOSTS) if host != lost or how == "blip"]
            assert all(codes[host] == 0 for host in left), report
            assert gone == (set() if how == "blip" else {lost * RANKS, lost * RANKS + 1}), report
            came = sum(len(change["joined"]) for change in changes)
            assert came == (RANKS if how == "replace" else 0), report
            assert how == "blip" or changes[-1]["ranks"] == (HOSTS - 1) * RANKS + came, report
            assert how != "replace" or codes[-1] == 0, report
            steps = [event["step"] for event in events if "loss" in event]
            assert steps == list(range(steps[0], steps_in_all + steps[0])), report
            if how in ("cut", "heal"):
                # Where the network is whole again, its ranks may reach the store before they give it up.
                said = ["which is lost"] + (["go on without this one"] if how == "heal" else [])
                assert codes[lost] != 0 and any(text in texts[lost] for text in said), report
    print(report.splitlines()[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="shoal-lost-") as temporary:
        lose_a_host(temporary)
