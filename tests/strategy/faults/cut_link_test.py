"""Cuts the link between two hosts of two ranks that train: every rank ends in time and names the ranks it cannot reach.

    python cut_link_test.py FAULT_RANK TRANSPORT

Needs root; ends with code 77 (skipped) where network namespaces are not allowed.
"""

import os
import re
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "support"))
from hosts import Hosts  # noqa: E402

TIMEOUT = 6  # of the ranks' operations, in seconds
MARGIN = 9  # to find out whom to blame, and to end


class Host:
    """What the ranks of a host say, and when they had ended."""

    def __init__(self, process):
        self.process = process
        self.text = ""
        self.trains = threading.Event()
        self.ended = None
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self):
        for line in self.process.stdout:
            self.text += line
            if line.startswith("training"):
                self.trains.set()
        self.process.wait()
        self.ended = time.monotonic()


def main():
    program, transport = sys.argv[1:]
    command = [program, "long", "0", transport, str(TIMEOUT)]
    with Hosts(2, "1gbit") as network:
        hosts = [Host(network.start(host, 2, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
                 for host in range(2)]
        for host in hosts:
            assert host.trains.wait(60), "the ranks do not train: " + host.text
        time.sleep(0.5)
        network.cut(1)
        cut = time.monotonic()
        for number, host in enumerate(hosts):
            host.thread.join(max(0, cut + TIMEOUT + MARGIN - time.monotonic()))
            if host.ended is None:
                host.process.kill()
                sys.exit(f"host {number} has not ended within {TIMEOUT} + {MARGIN} s: {host.text}")
            others = "2, 3" if number == 0 else "0, 1"
            named = []
            for rank in (2 * number, 2 * number + 1):
                said = [line for line in host.text.splitlines()
                        if line.startswith("error: ") and f"detected by rank {rank} " in line]
                assert len(said) == 1, f"rank {rank} of host {number}: {host.text}"
                named.append(re.search(rf"rank\(s\) {others} on other hosts", said[0]) is not None)
                # One that began the operation later sees the other one end at its deadline.
                beside = 2 * number + (rank + 1) % 2
                assert named[-1] or re.search(rf"rank {beside} \(pid \d+\) is gone", said[0]), said[0]
            assert any(named), host.text
            print(f"host {number} ended {host.ended - cut:.1f} s after the cut\n{host.text}")


if __name__ == "__main__":
    main()
