r"""Trains over slow links: every strategy on the same hosts, in network namespaces, one rank each.

    python bench/slow_links.py --shoal build/shoal --rate 100mbit --hosts 4

Trains each variant three times: as it is, with one host at a quarter of the speed (its ranks are stopped three quarters of the
time), and with one host killed after --kill-step steps. Prints the table of docs/decentralized.md: step time (mean over all steps
but the first ones (--skip), from the start of one to that of the next), time to the wanted test accuracy (training alone, without start and evaluation), bytes that a
rank has sent. Needs root, for the namespaces. About --epochs times 4 minutes a variant and condition.

    python bench/slow_links.py --shoal build/shoal --rate 10gbit --hosts 2 --transport tcp --model gpt --size small --data reference \
        --batch 4 --steps 8 --skip 3 --condition none --rounds 7 --peer-python PYTHON --peer-script REFERENCE/peers.py local fsdp fsdp2_full

With --rounds, the variants take turns, and a second table has the medians of step times. Other names than those of the variants are peers.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "support"))
from hosts import Hosts  # noqa: E402

VARIANTS = {
    "local": ["--strategy", "local"],
    "zero1": ["--strategy", "zero1"],
    "zero2": ["--strategy", "zero2"],
    "megatron": ["--strategy", "megatron"],
    "fsdp": ["--strategy", "fsdp"],
    "fsdp-elastic": ["--strategy", "fsdp", "--elastic", "1"],
    "fsdp-bf16": ["--strategy", "fsdp", "--dtype", "bf16_mixed"],
    "ddp": ["--strategy", "ddp"],
    "ddp-bf16": ["--strategy", "ddp", "--compress", "bf16"],
    "ddp-powersgd": ["--strategy", "ddp", "--compress", "powersgd:4:2"],
    "ring": ["--strategy", "decentralized", "--topology", "ring"],
    "one-peer-exp": ["--strategy", "decentralized", "--topology", "one-peer-exp"],
    "one-peer-exp-bf16": ["--strategy", "decentralized", "--topology", "one-peer-exp", "--exchange-dtype", "bf16"],
    "one-peer-exp-int8": ["--strategy", "decentralized", "--topology", "one-peer-exp", "--exchange-dtype", "int8"],
    "one-peer-exp-top_k": ["--strategy", "decentralized", "--topology", "one-peer-exp", "--exchange-dtype", "top_k"],
    "diloco": ["--strategy", "diloco", "--sync-every", "20"],
    "diloco-streaming": ["--strategy", "diloco", "--sync-every", "20", "--fragments", "2", "--sync-delay", "9"],
    "diloco-streaming-bf16": ["--strategy", "diloco", "--sync-every", "20", "--fragments", "2", "--sync-delay", "9", "--reduce-dtype", "bf16"],
}
CONDITIONS = ["none", "slow", "kill"]


def ranks_of(process):
    """Processes of the program below a host's shell; some may have ended."""
    found, waiting = [], [process.pid]
    while waiting:
        pid = waiting.pop()
        try:
            waiting += [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:
            continue
        if b"--strategy" in line:
            found.append(pid)
    return found


def send_signal(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended
            pass


def slow_down(pids):
    """Lets processes run a quarter of the time."""
    send_signal(pids, signal.SIGSTOP)
    time.sleep(0.03)
    send_signal(pids, signal.SIGCONT)
    time.sleep(0.01)


def sent_bytes(hosts, host):
    text = subprocess.run(["ip", "netns", "exec", hosts.names[host], "cat", f"/sys/class/net/{hosts.links[host]}/statistics/tx_bytes"],
                          capture_output=True, text=True, check=True).stdout
    return int(text)


def measure(options, hosts, name, condition):
    with tempfile.TemporaryDirectory() as folder:
        report, metrics = pathlib.Path(folder) / "report.json", pathlib.Path(folder) / "metrics.jsonl"
        command = [options.shoal, "train", "--model", options.model, "--size", options.size, "--data", options.data,
                   "--transport", options.transport, "--batch", str(options.batch), *([] if options.data == "reference" else ["--eval"]), "--lr", str(options.lr), "--schedule", options.schedule,
                   *(["--steps", str(options.steps)] if options.steps else ["--epochs", str(options.epochs)]),
                   "--json", str(report), "--metrics", str(metrics), *VARIANTS[name]]
        if "decentralized" in VARIANTS[name]:
            command += ["--neighbour-timeout", str(options.neighbour_timeout)]
        before = [sent_bytes(hosts, host) for host in range(options.hosts)]
        start = time.time()
        processes = [hosts.start(host, 1, command) for host in range(options.hosts)]
        victims = None
        while any(process.poll() is None for process in processes):
            steps = metrics.read_text().count("\n") if metrics.exists() and victims is None else 0
            if condition != "none" and steps >= (options.kill_step if condition == "kill" else 1):
                victims = ranks_of(processes[-1])
                if condition == "kill":
                    send_signal(victims, signal.SIGKILL)
            if condition == "slow" and victims and processes[-1].poll() is None:
                slow_down(victims)
            else:
                time.sleep(0.1)
            if time.time() - start > options.limit:
                for process in processes:
                    process.kill()
        if not report.exists():
            return {"name": name, "condition": condition, "codes": [process.returncode for process in processes]}
        result = json.loads(report.read_text())
        timing, accuracy = result["timing"], [entry["accuracy"] for entry in result.get("eval", [])]
        epoch_seconds = sum(timing["step_ms"]) / 1000 / max(1, len(accuracy))
        reached = next((epoch for epoch, value in enumerate(accuracy, 1) if value >= options.accuracy), None)
        sent = [sent_bytes(hosts, host) - old for host, old in enumerate(before)]
        return {"name": name, "condition": condition, "step_ms": sum(timing["step_ms"][options.skip:]) / (len(timing["step_ms"]) - options.skip), "accuracy": accuracy[-1] if accuracy else None,
                "reached_s": reached and reached * epoch_seconds, "sent_mb": max(sent) / 1e6,
                "per_step_mb": max(sent) / 1e6 / len(timing["step_ms"]), "strategy": result.get("strategy", {})}


# Runs a peer's worker of the reference on each host; the hosts share a file as their store.
PEER = """import sys
sys.path.insert(0, sys.argv[1])
import peers
options = peers.parser().parse_args(sys.argv[4:])
peers.worker(int(sys.argv[2]), options, sys.argv[3])
"""


def measure_peer(options, hosts, name):
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--peer", name, "--model", options.model, "--size", options.size, "--batch", str(options.batch), "--steps", str(options.steps),
                     "--impl", "fused", "--world", str(options.hosts), "--optimizer", "adamw"]
        program = pathlib.Path(folder) / "worker.py"
        program.write_text(PEER)
        before = [sent_bytes(hosts, host) for host in range(options.hosts)]
        processes = [hosts.start(host, 1, ["env", f"GLOO_SOCKET_IFNAME={hosts.links[host]}", "OMP_NUM_THREADS=1", options.peer_python, str(program),
                                           str(pathlib.Path(options.peer_script).parent), str(host), folder, *arguments])
                     for host in range(options.hosts)]
        codes = [process.wait(options.limit) for process in processes]
        reports = sorted(pathlib.Path(folder).glob("*.json"))
        if any(codes) or not reports:
            return {"name": name, "condition": "none", "codes": codes}
        times = [max(step) for step in zip(*(json.loads(report.read_text())["step_ms"] for report in reports))]
        sent = max(sent_bytes(hosts, host) - old for host, old in enumerate(before)) / 1e6
        return {"name": name, "condition": "none", "step_ms": sum(times[options.skip:]) / (len(times) - options.skip), "accuracy": None,
                "reached_s": None, "sent_mb": sent, "per_step_mb": sent / len(times)}


def row(result):
    head = f"| {result['name']} | {dict(none='', slow='a host at 1/4', kill='a host killed')[result['condition']]} | "
    if "step_ms" not in result:
        return head + f"ends with exit codes {result['codes']} | | | |"
    reached = f"{result['reached_s']:.1f}" if result["reached_s"] else "-"
    accuracy = f"{100 * result['accuracy']:.2f}" if result["accuracy"] is not None else ""
    return head + f"{result['step_ms']:.1f} | {reached} | {accuracy} | {result['per_step_mb']:.3f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", default="fashion-mnist", help="reference: no accuracy, any model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="in place of epochs")
    parser.add_argument("--skip", type=int, default=1, help="first steps that do not count; PowerSGD begins in the third")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--accuracy", type=float, default=0.88)
    parser.add_argument("--neighbour-timeout", type=float, default=5)
    parser.add_argument("--condition", action="append", choices=CONDITIONS, help="again for another; all if not given")
    parser.add_argument("--kill-step", type=int, default=50, help="after so many steps a host is killed, under that condition")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a run may take")
    parser.add_argument("--json")
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer-python", help="Python with torch and the peers")
    parser.add_argument("--peer-script", help="path of the reference's peers.py")
    parser.add_argument("variants", nargs="*", default=list(VARIANTS)[6:], help=", ".join(VARIANTS))
    options = parser.parse_args()
    results = []
    print(f"| | condition | ms per step | seconds to {options.accuracy:.0%} | accuracy, % | MB per step |\n|---|---|---|---|---|---|")
    with Hosts(options.hosts, options.rate) as hosts:
        for name in options.variants * options.rounds:
            for condition in (options.condition or CONDITIONS) if name in VARIANTS else ["none"]:
                results.append(measure(options, hosts, name, condition) if name in VARIANTS else measure_peer(options, hosts, name))
                print(row(results[-1]), flush=True)
    if options.rounds > 1:
        print(f"\nmilliseconds per step: medians of {options.rounds} rounds; the rest: the first round")
        for case in dict.fromkeys((result["name"], result["condition"]) for result in results):
            complete = [result for result in results if (result["name"], result["condition"]) == case and "step_ms" in result]
            print(row({**complete[0], "step_ms": statistics.median(result["step_ms"] for result in complete)}) if complete else f"| {case} | failed |")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
