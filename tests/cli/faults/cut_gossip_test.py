"""Cuts the link to one of three hosts whose ranks gossip: the others go on without it; all end in time.

    python cut_gossip_test.py SHOAL LOST_HOST

Host 0 has rank 0 and with it the job's store: without that the others cannot meet in the end, and say so. Needs root; ends
with code 77 (skipped) where network namespaces are not allowed.
"""

import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "support"))
from hosts import Hosts  # noqa: E402

HOSTS = 3
STEPS = 4000
NEIGHBOUR_TIMEOUT = 2  # seconds
TIMEOUT = 6  # of an operation, seconds
# A rank waits for a neighbour that shows nothing, and for one that takes nothing; the rest is for a busy machine.
LONGEST_PAUSE = 2 * NEIGHBOUR_TIMEOUT + 6
LONGEST = 90  # seconds until all have ended: kernels give up on a silent peer after 15


def lines_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0


def watch(processes, metrics, began):
    """When each had ended, and the longest time without a step while the writer of metrics trained."""
    ended, lines, moved, pause = [None] * len(processes), lines_of(metrics), began, 0.0
    while None in ended and time.monotonic() - began < LONGEST:
        time.sleep(0.05)
        now = time.monotonic()
        for host, process in enumerate(processes):
            if ended[host] is None and process.poll() is not None:
                ended[host] = now - began
        if lines_of(metrics) != lines:
            pause = max(pause, now - moved)
            lines, moved = lines_of(metrics), now
    return ended, pause


def cut_a_host_off(folder):
    shoal, lost = sys.argv[1], int(sys.argv[2])
    metrics = os.path.join(folder, "metrics.jsonl")
    command = [shoal, "train", "--strategy", "decentralized", "--topology", "ring", "--model", "mlp", "--data",
               "reference", "--steps", str(STEPS), "--threads", "1", "--neighbour-timeout", str(NEIGHBOUR_TIMEOUT),
               "--timeout", str(TIMEOUT), "--metrics", metrics]
    with Hosts(HOSTS, "1gbit") as network:
        files = [open(os.path.join(folder, f"host{host}"), "w+", encoding="utf-8") for host in range(HOSTS)]
        processes = [network.start(host, 1, command, stdout=files[host], stderr=subprocess.STDOUT)
                     for host in range(HOSTS)]
        begun = time.monotonic()
        while lines_of(metrics) < 100:
            assert time.monotonic() - begun < 60, "the ranks do not train"
            time.sleep(0.05)
        network.cut(lost)
        ended, pause = watch(processes, metrics, time.monotonic())
        texts = []
        for process, file in zip(processes, files):
            process.kill()
            file.seek(0)
            texts.append(file.read())
        codes = [process.wait() for process in processes]
        report = f"ended {ended} s after the cut with {codes}, longest pause {pause:.1f} s\n" + "\n".join(
            line for text in texts for line in text.splitlines() if not line.startswith("[E"))
        assert None not in ended, "not ended: " + report
        if lost == 0:
            for host in (1, 2):
                assert codes[host] == 0 or "store at 10.77.0.1" in texts[host], report
        else:
            assert codes[0] == 0 and codes[1] == 0, report
            assert lines_of(metrics) >= STEPS, report
            assert pause < LONGEST_PAUSE, report
        print(report)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="shoal-cut-") as temporary:
        cut_a_host_off(temporary)
