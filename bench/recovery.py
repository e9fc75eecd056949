"""What the death of a rank costs: from kill -9 to the end of the next complete step (ELA09), and what readiness for it costs.

    python bench/recovery.py --shoal build/shoal --json recovery.json
    python bench/recovery.py --shoal build/shoal --pairs 0 --peers torchrun torchft --peer-python PYTHON --peer-models REFERENCE

Trains with `shoal train --elastic 1`, kills one rank after the other run by run, at a random moment of a step, and reads from the metrics
file when the next step that was begun without it is complete. Peers take turns: PyTorch's DistributedDataParallel over Gloo, which torchrun starts again from a
checkpoint of every step (restarted_training.py), and torchft (torchft_training.py). The bound is 1.5 ordinary steps of the ranks that are
left, plus 0.5 s. Then trains in pairs without and with --elastic, and compares the median steps and the memory of all ranks (PSS); bounds 1.01 and 1.05. Times depend on what else the machine
does: the load is printed beside them.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time


def command(options, folder, *more):
    return [options.shoal, "train", "--data", "reference", "--model", options.model, "--size", options.size, "--ranks", str(options.ranks),
            "--batch", str(options.batch), "--threads", "1", "--metrics", str(folder / "metrics.jsonl"), "--json", str(folder / "report.json"), *more]


def lines_of(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]  # the last line may still grow


def steps_of(path):
    """Lines of complete steps."""
    return [line for line in lines_of(path) if "loss" in line]


def full_steps(path, ranks):
    """Those of all ranks; torchft's first quorums may be smaller."""
    return [step for step in steps_of(path) if step.get("ranks", ranks) == ranks]


def steps_after_change(path, ranks, before):
    """Those that were begun without the rank that ended: after shoal's event, after torchrun's restart, of torchft's smaller quorum.
    before: lines at the kill; torchft's first quorums are small, too."""
    lines = lines_of(path)[before:]
    events = [number for number, line in enumerate(lines) if "event" in line]
    if events:
        return [line for line in lines[events[0]:] if "loss" in line]
    return [line for line in lines if line.get("attempt", 0) > 0 or line.get("ranks", ranks) < ranks]


def shoal_job(options, folder):
    return command(options, folder, "--strategy", options.strategy, "--elastic", "1", "--steps", "1000000")


def torchrun_job(options, folder):
    # Without this variable the restarted ranks read their predecessors' addresses in the agent's store, and hang (pytorch#135712).
    return ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", options.peer_python, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), "--max-restarts", "100", "--monitor-interval", "0.1", "--standalone",
            str(pathlib.Path(__file__).with_name("restarted_training.py")), "--models", options.peer_models, "--folder", str(folder),
            "--model", options.model, "--size", options.size, "--batch", str(options.batch)]


def torchft_job(options, folder):
    return [options.peer_python, str(pathlib.Path(__file__).with_name("torchft_training.py")), "--ranks", str(options.ranks), "--models",
            options.peer_models, "--folder", str(folder), "--model", options.model, "--size", options.size, "--batch", str(options.batch)]


def ranks_of(launcher, folder):
    found = {int(path.name[5:]): int(path.read_text()) for path in folder.glob("rank-*")}
    for child in subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split():
        try:
            name = pathlib.Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("shoal-rank-"):
            found[int(name[11:])] = int(child)
    return found


def kill_once(options, job, rank, random_source):
    """Seconds from the kill to the end of the next complete step, and the ordinary step afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        metrics = folder / "metrics.jsonl"
        run = subprocess.Popen(job(options, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while len(full_steps(metrics, options.ranks)) < options.before:
                if run.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{job.__name__}: the training did not begin")
                time.sleep(0.005)
            time.sleep(random_source.random() * steps_of(metrics)[-1]["step_ms"] / 1e3)
            before = len(lines_of(metrics))
            os.kill(ranks_of(run.pid, folder)[rank], signal.SIGKILL)
            killed = time.monotonic()
            recovered = None
            while True:
                steps = steps_after_change(metrics, options.ranks, before)
                if recovered is None and steps:
                    recovered = time.monotonic() - killed
                if len(steps) > options.after:
                    return recovered, statistics.median(step["step_ms"] for step in steps[1:]) / 1e3
                if run.poll() is not None or time.monotonic() - killed > 120:
                    raise SystemExit(f"{job.__name__}: the training did not go on")
                time.sleep(0.002)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60)


def trained(options, strategy, *more):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run(command(options, folder, "--strategy", strategy, "--steps", str(options.pair_steps), *more), check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report = json.loads((folder / "report.json").read_text())
        return report["timing"]["median_ms"], sum(report["memory"]["pss_mib"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--json")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--before", type=int, default=4, help="steps before each kill")
    parser.add_argument("--after", type=int, default=4, help="steps after it, whose median is the ordinary step")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--pair-steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=[], choices=["torchrun", "torchft"])
    parser.add_argument("--peer-python", help="Python with torch, numpy, and torchft-nightly for torchft")
    parser.add_argument("--peer-models", help="folder of the reference's models.py")
    options = parser.parse_args()
    random_source = random.Random(options.seed)
    result = {"config": vars(options), "kills": {}, "pairs": {}, "load_1min": [os.getloadavg()[0]]}
    jobs = {"shoal": shoal_job} | {name: {"torchrun": torchrun_job, "torchft": torchft_job}[name] for name in options.peers}
    for kill in range(options.kills):
        for name, job in jobs.items():
            recovered, step = kill_once(options, job, kill % options.ranks, random_source)
            kills = result["kills"].setdefault(name, [])
            kills.append({"rank": kill % options.ranks, "seconds": recovered, "step": step, "bound": 1.5 * step + 0.5})
    for strategy in ("ddp", "zero2", "fsdp") if options.pairs else ():
        pairs = [(trained(options, strategy), trained(options, strategy, "--elastic", "1")) for _ in range(options.pairs)]
        result["pairs"][strategy] = {"time": statistics.median(b[0] / a[0] for a, b in pairs),
                                     "memory": statistics.median(b[1] / a[1] for a, b in pairs), "runs": pairs}
    result["load_1min"].append(os.getloadavg()[0])
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.model} {options.size}, {options.strategy}, {options.ranks} ranks, load {result['load_1min'][0]:.1f} to {result['load_1min'][1]:.1f}")
    for name, kills in result["kills"].items():
        seconds, bound, step = (statistics.median(kill[key] for kill in kills) for key in ("seconds", "bound", "step"))
        print(f"  {name}: kill to the next complete step, median of {len(kills)}: {seconds:.3f} s; limit 1.5 x {step:.3f} s + 0.5 s = {bound:.3f} s")
    for strategy, pair in result["pairs"].items():
        print(f"  {strategy:6s} with --elastic: step x {pair['time']:.4f} (limit 1.01), memory x {pair['memory']:.4f} (limit 1.05)")


if __name__ == "__main__":
    main()
