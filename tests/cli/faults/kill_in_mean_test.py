"""Kills a rank of `shoal train --strategy hybrid_gossip` within the mean of batch norm's buffers over all ranks, which an
evaluation begins with or ends with: its host ends with an error that names it, the other host goes on, nobody hangs.

    python kill_in_mean_test.py SHOAL TRANSPORT [TIMES]
"""

import mmap
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

LIMIT = 30  # seconds from the kill to the end of the job, most of them for a busy machine
LABEL = b"mean of the ranks"


def write_images(folder):
    """Images and labels that count up, as Fashion-MNIST has them."""

    def write(name, sizes, modulus):
        count = 1
        header = bytes([0, 0, 8, len(sizes)])
        for size in sizes:
            header += struct.pack(">I", size)
            count *= size
        (folder / name).write_bytes(header + bytes(i % modulus for i in range(count)))

    for part in ("train", "t10k"):
        write(part + "-images-idx3-ubyte", [16, 28, 28], 251)
        write(part + "-labels-idx1-ubyte", [16], 10)


def newest_label(flight):
    """What a rank's flight recorder (src/comm/telemetry/flight_format.h) says it has called last."""
    record_bytes, capacity = struct.unpack_from("<II", flight, 8)
    (begun,) = struct.unpack_from("<Q", flight, 184)
    header = len(flight) - capacity * record_bytes
    at = header + (begun - 1) % capacity * record_bytes
    ticket = struct.unpack_from("<Q", flight, at)[0]
    return flight[at + 80:at + 176].split(b"\0")[0] if begun > 0 and ticket == begun else b""


def rank_of(pid):
    try:
        name = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return int(name[11:]) if name.startswith("shoal-rank-") else None


def kill_within(pid, path):
    """Stops the rank for an instant again and again; whether it was within the mean then, and has been killed."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as flight:
        for _ in range(20000):
            try:
                os.kill(pid, signal.SIGSTOP)
                if newest_label(flight) == LABEL:
                    os.kill(pid, signal.SIGKILL)
                    return True
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return False
            time.sleep(random.uniform(0, 0.002))
    return False


def run(shoal, transport, rank):
    """What went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="shoal-kill-") as name:
        folder = pathlib.Path(name)
        write_images(folder)
        with open(folder / "output", "w+", encoding="utf-8") as output:
            launcher = subprocess.Popen(
                [shoal, "train", "--model", "cnn", "--data", f"fashion-mnist:{folder}", "--strategy", "hybrid_gossip",
                 "--ranks", "4", "--topology-local-size", "2", "--threads", "1", "--batch", "2", "--eval", "--epochs",
                 "100", "--neighbour-timeout", "2", "--transport", transport, "--flight-recorder", str(folder)],
                stdout=output, stderr=subprocess.STDOUT)
            try:
                flight = folder / f"rank-{rank}.flight"
                begun = time.monotonic()
                while (folder / "output").read_text().count("accuracy") < 3:
                    if launcher.poll() is not None or time.monotonic() - begun > 60:
                        return "it does not train: " + (folder / "output").read_text()
                    time.sleep(0.01)
                children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                pid = next(int(child) for child in children if rank_of(child) == rank)
                killed = kill_within(pid, flight)
                begun = time.monotonic()
                launcher.wait(LIMIT)
                seconds = time.monotonic() - begun
            except subprocess.TimeoutExpired:
                return f"not ended {LIMIT} s after rank {rank} was killed: " + (folder / "output").read_text()
            finally:
                if launcher.poll() is None:
                    launcher.terminate()
                    launcher.wait()
        text = (folder / "output").read_text()
        if not killed:
            return "the rank was never found within the mean: " + text
        if launcher.returncode != 0 or "epoch 100: test loss" not in text:
            return f"the other host did not go on ({launcher.returncode}): {text}"
        if f"rank {rank} " not in text:
            return "nobody names the rank: " + text
        print(f"rank {rank} killed, ended {seconds:.1f} s later", flush=True)
        return None


def main():
    shoal, transport = sys.argv[1:3]
    for time_ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 4):
        if wrong := run(shoal, transport, time_ % 4):
            sys.exit(wrong)


if __name__ == "__main__":
    main()
