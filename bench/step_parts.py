"""Where the time of a training step goes, under every strategy, beside what the machine's memory allows.

    python bench/step_parts.py --shoal build/shoal                        # gpt small, 2 ranks, all strategies
    python bench/step_parts.py --shoal build/shoal --model mlp --size tiny --steps 200 --json profile.json

All strategies take turns in every round. A round trains each of them twice: as it is, for the step's time and the kernel's
counters, and with a trace, for the parts of the step. Before the rounds, as many processes as there are ranks measure at the same time what copying a byte and
touching a fresh page cost here.

Times are milliseconds of a step and rank: medians over the rounds of the median over the steps after the warm-up, means over
ranks. Counters are means over the same steps. Columns:
  step      the whole step, without a trace
  compute   forward and backward, without what follows
  copy      gradients into their buckets; values out of other ranks' memory
  reduce    sums over ranks; in decentralised training also averages with neighbours
  wait      for other ranks, and for the processor
  update    of the local optimizer
  engine    hooks, bookkeeping of buckets and steps, and zero_grad
  faults    page faults, and the system's time, which most of them take (it is part of the columns before)
  sleeps    times that a thread waited in the kernel
  limit     least time for the bytes of copy, reduce and update at the copy bandwidth measured before, for comparison with them
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

PARTS = {"compute": ("step", "forward", "backward"), "copy": ("copy", "show"), "reduce": ("reduce", "mix"), "wait": ("wait",),
         "update": ("update",), "engine": ("hook", "optimizer")}
COUNTERS = ("page_faults", "user_ms", "system_ms", "sleeps", "preemptions")
ALONE = "local"  # ranks that never communicate


# What memory costs here.

def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def timed(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def memory_costs(barrier, results, mebibytes=64, repetitions=9):
    size = mebibytes << 20
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    copy = lambda: ctypes.memmove(address_of(target), address_of(source), size)  # noqa: E731
    ctypes.memset(address_of(source), 1, size)
    copy()
    copies, fills, touches = [], [], []
    for _ in range(repetitions):
        barrier.wait()
        copies.append(timed(copy))
        fills.append(timed(lambda: ctypes.memset(address_of(target), 1, size)))
        fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        touches.append(timed(lambda: ctypes.memset(address_of(fresh), 1, size)))
    pages = size // mmap.PAGESIZE
    results.put({"copy_ns_per_byte": 1e9 * statistics.median(copies) / size,
                 "fresh_page_us": 1e6 * (statistics.median(touches) - statistics.median(fills)) / pages})


def machine_of(ranks):
    barrier, results = multiprocessing.Barrier(ranks), multiprocessing.Queue()
    workers = [multiprocessing.Process(target=memory_costs, args=(barrier, results)) for _ in range(ranks)]
    for worker in workers:
        worker.start()
    each = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return {name: statistics.mean(costs[name] for costs in each) for name in each[0]}


# Parts of a step, from its trace.

def own_times(events):
    """Time of each span without the spans inside it, by name and step; `wait` for all waits."""
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    times, open_spans, step = {}, [], -1
    for event in spans:
        while open_spans and (open_spans[-1]["tid"] != event["tid"] or open_spans[-1]["end"] <= event["ts"]):
            open_spans.pop()
        name = "wait" if event["cat"] == "wait" else event["name"]
        if name == "step":
            step = event["args"]["step"]
        if open_spans:
            times[open_spans[-1]["key"]] -= event["dur"]
        if not open_spans and name != "step":
            continue  # between steps
        key = (step, name)
        times[key] = times.get(key, 0) + event["dur"]
        open_spans.append({"tid": event["tid"], "end": event["ts"] + event["dur"], "key": key})
    return times


def parts_of(trace, warm_up):
    times = own_times(json.loads(trace.read_text())["traceEvents"])
    steps = sorted({step for step, _ in times if step >= warm_up})
    return {part: statistics.median(sum(times.get((step, name), 0) for name in names) / 1e3 for step in steps) for part, names in PARTS.items()}


# Runs.

def command_of(options, strategy):
    return [options.shoal, "train", "--data", "reference", "--model", options.model, "--size", options.size, "--strategy", strategy,
            "--ranks", str(options.ranks), "--threads", "1", "--steps", str(options.steps), "--optimizer", options.optimizer]


def run(command):
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}".strip())


def round_of(options, strategy):
    with tempfile.TemporaryDirectory() as folder:
        report, traces = pathlib.Path(folder) / "report.json", pathlib.Path(folder) / "traces"
        run([*command_of(options, strategy), "--json", str(report)])
        result = json.loads(report.read_text())
        run([*command_of(options, strategy), "--trace", str(traces)])
        each = [parts_of(trace, result["timing"]["warm_up"]) for trace in sorted(traces.glob("rank-*.json"))]
    steady = result["timing"]["step_ms"][result["timing"]["warm_up"]:]
    return {"step": statistics.median(steady), "least": min(steady), "growth_mib": max(result["memory"]["growth_mib"]),
            **{part: statistics.mean(rank[part] for rank in each) for part in PARTS},
            **{name: statistics.mean(result["counters_per_step"][name]) for name in COUNTERS},
            "memory": {name: max(result["memory"]["by_rank"][f"{name}_mib"]) for name in ("params", "grads", "state")}}


# Limits and tables.

def limit_of(options, strategy, measured, local, machine):
    """Milliseconds for the bytes that a step has to move beyond forward and backward."""
    share = measured["memory"]["state"] / local["memory"]["state"] if local["memory"]["state"] else 1
    gradients = local["memory"]["grads"] * (1 << 20)
    update = 28 / 4 * gradients * share  # AdamW reads 16 bytes of a float32 parameter and writes 12
    moved = 0 if strategy in (ALONE, "none") else 4 * gradients  # read and written once as a copy, once in a sum
    return 1e-6 * (update + moved) * machine["copy_ns_per_byte"] / 2


def merged(rounds):
    result = {name: statistics.median(each[name] for each in rounds) for name in rounds[0] if name != "memory"}
    result["memory"] = rounds[0]["memory"]
    return result


def table(options, results):
    names = ["step", "least", "x local", *PARTS, "faults", "system", "sleeps", "limit", "MiB"]
    lines = ["| strategy | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for strategy, one in results.items():
        digits = 1 if results[ALONE]["step"] > 20 else 3
        number = lambda name: f"{one[name]:.{digits}f}"  # noqa: E731
        cells = [number("step"), number("least"), f"{one['step'] / results[ALONE]['step']:.3f}", *map(number, PARTS),
                 f"{one['page_faults']:.0f}", number("system_ms"), f"{one['sleeps']:.1f}", number("limit"), f"{one['growth_mib']:.0f}"]
        lines.append(f"| {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def strategies_of(shoal):
    """The names in the list that ends the help of `shoal train`."""
    text = subprocess.run([shoal, "train", "--help"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^ +(\w+) ", text[text.index("Strategies:"):], re.MULTILINE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--strategies", help="separated by commas; default: all of the registry")
    parser.add_argument("--json")
    options = parser.parse_args()
    strategies = options.strategies.split(",") if options.strategies else strategies_of(options.shoal)
    strategies = [ALONE, *(name for name in strategies if name not in (ALONE, "none"))]
    machine = machine_of(options.ranks)
    rounds = {name: [] for name in strategies}
    refused = {}
    for _ in range(options.rounds):
        for name in [name for name in strategies if name not in refused]:
            try:
                rounds[name].append(round_of(options, name))
            except RuntimeError as error:  # some strategies need more ranks or hosts
                refused[name] = str(error)
                del rounds[name]
    if ALONE in refused:
        sys.exit(refused[ALONE])
    results = {name: merged(each) for name, each in rounds.items()}
    for name, one in results.items():
        one["limit"] = limit_of(options, name, one, results[ALONE], machine)
    print(f"{options.model} {options.size}, {options.ranks} ranks of one thread, {options.rounds} rounds of {options.steps} steps, {options.optimizer}; "
          f"a copy moves {2 / machine['copy_ns_per_byte']:.1f} GB/s a rank (bytes read and written), a fresh page costs {machine['fresh_page_us']:.2f} us\n")
    print(table(options, results))
    for name, error in refused.items():
        print(f"\nnot measured: {name}: {error}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"options": vars(options), "machine": machine, "strategies": results, "rounds": rounds, "refused": refused}, indent=1))


if __name__ == "__main__":
    main()
