"""Compares `shoal train` with the Python reference peers, in turn, in one run.

Every round runs each contestant once, so that a noisy moment of the machine does not fall on one of them only; ratios
are formed within a round. Figures: median step time after 3 warm-up steps, and growth of resident memory.

    python bench/compare.py --reference REFERENCE_FOLDER --python PYTHON_WITH_TORCH --rounds 5 -- \\
        --model gpt --size small --world 2 --steps 12 --batch 4 --optimizer adamw

REFERENCE_FOLDER holds peers.py; both sides get the same model, parameters, data, optimizer and number of threads.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--reference", required=True, help="folder of peers.py")
    p.add_argument("--python", default="python3", help="interpreter that imports torch")
    p.add_argument("--shoal", default=os.path.join(os.path.dirname(__file__), "..", "build", "shoal"))
    p.add_argument("--peers", nargs="+", default=["local", "ddp", "ddp_view"])
    p.add_argument("--strategies", nargs="+", default=["local", "ddp"])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--exact-memory", action="store_true",
                   help="malloc returns freed blocks at once on both sides: true memory, slower steps")
    p.add_argument("--json", help="file for all figures")
    p.add_argument("rest", nargs="*", help="--model, --size, --world, --steps, --batch, --optimizer, --accumulate")
    return p.parse_args()


def run(command, env):
    """Runs a command that writes its report to the file given last; returns the report."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        done = subprocess.run([*command, "--json", path], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True, check=False)
        if done.returncode != 0:
            raise SystemExit("%s failed:\n%s" % (" ".join(command), done.stderr[-2000:]))
        with open(path) as f:
            return json.load(f)


def commands(args):
    """{name: command} of all contestants."""
    result = {}
    for peer in args.peers:
        extra = ["--exact-memory"] if args.exact_memory else []
        result["python " + peer] = [args.python, os.path.join(args.reference, "peers.py"), "--peer", peer, *extra,
                                    *args.rest]
    own = [a.replace("--world", "--ranks") for a in args.rest]
    for strategy in args.strategies:
        result["shoal " + strategy] = [args.shoal, "train", "--data", "reference", "--strategy", strategy, "--threads",
                                       "1", *own]
    return result


def main():
    args = parse()
    env = dict(os.environ)
    if args.exact_memory:
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    runs = {name: [] for name in commands(args)}
    for round_ in range(args.rounds):
        for name, command in commands(args).items():
            report = run(command, env)
            runs[name].append(dict(median_ms=report["timing"]["median_ms"], min_ms=report["timing"]["min_ms"],
                                   growth_mib=max(report["memory"]["growth_mib"]),
                                   load=report["timing"].get("load_1min")))
            print("# round %d  %-16s %9.3f ms" % (round_, name, runs[name][-1]["median_ms"]), flush=True)
    print("\n| contestant | step median ms (min .. max over rounds) | growth MiB | shoal ddp / this, median (min .. max) |")
    print("|---|---|---|---|")
    for name, rounds in runs.items():
        times = [r["median_ms"] for r in rounds]
        ratios = [a["median_ms"] / b["median_ms"] for a, b in zip(runs.get("shoal ddp", rounds), rounds)]
        print("| %s | %.3f (%.3f .. %.3f) | %.1f | %.3f (%.3f .. %.3f) |" % (
            name, statistics.median(times), min(times), max(times),
            statistics.median(r["growth_mib"] for r in rounds),
            statistics.median(ratios), min(ratios), max(ratios)))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(arguments=args.rest, runs=runs), f, indent=1)


if __name__ == "__main__":
    main()
