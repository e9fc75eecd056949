"""What telemetry costs: the same training without and with it, by turns.

    python bench/telemetry.py --shoal build/shoal

Each round trains once without anything, once more without (what the machine alone makes of it), with the flight recorder, and with
flight recorder, traces and metrics. Prints the medians over the rounds of each one's median step, relative to the first of the round.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

VARIANTS = {
    "off": [],
    "off again": [],
    "flight recorder": ["--flight-recorder", "{folder}/flight"],
    "flight recorder, trace, metrics": ["--flight-recorder", "{folder}/flight", "--trace", "{folder}/trace", "--metrics", "{folder}/metrics.jsonl"],
}


def step_ms(options, more):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        subprocess.run([options.shoal, "train", "--data", "reference", "--model", options.model, "--size", options.size,
                        "--strategy", options.strategy, "--ranks", str(options.ranks), "--steps", str(options.steps),
                        "--json", str(report), *[word.format(folder=folder) for word in more]],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.loads(report.read_text())["timing"]["median_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    seen = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, more in VARIANTS.items():
            seen[name].append(step_ms(options, more))
    print(f"{options.model} {options.size}, {options.strategy}, {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps")
    for name, times in seen.items():
        ratios = sorted(time / first for time, first in zip(times, seen["off"]))
        print(f"  {name:32s} {statistics.median(times):8.3f} ms   x {statistics.median(ratios):.4f}  ({ratios[0]:.4f} to {ratios[-1]:.4f})")


if __name__ == "__main__":
    main()
