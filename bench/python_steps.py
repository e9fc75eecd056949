"""Steps of a GPT in Python: PyTorch's wrappers over the backends gloo and shoal, shoal's wrappers, and the C++ program.

    PYTHONPATH=build/python .venv/bin/python bench/python_steps.py --shoal build/shoal --rounds 7

Every round runs every variant once, one after the other in a new order, so that a slow minute meets all of them. A variant is a job of
its own: 2 ranks of one thread, --steps steps after 3 of warm-up; its figure is the median step of rank 0. The table has the median and
the least figure over the rounds, and the median of the ratios to the variant's reference in the same round. All variants in Python
begin with the same parameters and data; their last losses are compared. The program's model is the same (`--model gpt`), with other
data. Collectives are the median of 50 calls (4 MiB) or 1,000 (one element), after a warm-up.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import statistics
import subprocess
import tempfile
import time

WARM_UP = 3
SIZES = {"tiny": (2, 4, 64, 32), "small": (8, 8, 512, 128)}  # layers, heads, width, context
VOCABULARY = 256
LOSSES_WITHIN = 1e-3  # of each other after a run of float32, whose sums have other orders

# Variant: (kind, backend or "", reference of the ratio, largest ratio wanted).
STEPS = {
    "gloo ddp": ("torch", "gloo", None, None),
    "shoal ddp": ("torch", "shoal", "gloo ddp", 0.95),
    "gloo zero": ("torch", "gloo", None, None),
    "shoal zero": ("torch", "shoal", "gloo zero", 0.90),
    "gloo fsdp2": ("torch", "gloo", None, None),
    "shoal fsdp2": ("torch", "shoal", "gloo fsdp2", 0.75),
    "c++ ddp": ("program", "", None, None),
    "python ddp": ("wrapper", "shoal", "c++ ddp", 1.03),
    "c++ zero2": ("program", "", None, None),
    "python zero2": ("wrapper", "shoal", "c++ zero2", 1.03),
    "c++ megatron": ("program", "", None, None),
    "python megatron": ("wrapper", "shoal", "c++ megatron", 1.03),
    "c++ fsdp": ("program", "", None, None),
    "python fsdp": ("wrapper", "shoal", "c++ fsdp", 1.03),
}
COLLECTIVES = {"all-reduce 4 MiB": 1 << 20, "all-reduce 1 element": 1}
COLLECTIVES_WANTED = {"all-reduce 4 MiB": 0.4, "all-reduce 1 element": 1.0}


def models(size):
    import torch
    import torch.nn.functional as F
    from torch import nn

    layers, heads, width, context = SIZES[size]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1 = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.proj = nn.Linear(width, width)
            self.ln2 = nn.LayerNorm(width)
            self.fc = nn.Linear(width, 4 * width)
            self.out = nn.Linear(4 * width, width)

        def forward(self, x):
            batch, time, _ = x.shape
            parts = [part.view(batch, time, heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(width, 2)]
            y = F.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(batch, time, width))
            return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(VOCABULARY, width)
            self.wpe = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(width)
            for table in (self.wte, self.wpe):
                nn.init.normal_(table.weight, 0.0, 0.02)

        def forward(self, tokens):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.ln_f(x), self.wte.weight)

    return Gpt(), Block


def wrapped(variant, net, Block):
    """(model, optimizer) of a variant."""
    import torch
    import torch.distributed as dist

    adamw = dict(lr=1e-3, fused=True)
    AdamW = torch.optim.AdamW
    library, kind = variant.split()
    if library == "python":
        import shoal

        if kind == "ddp":
            model = shoal.nn.DistributedDataParallel(net)
            return model, AdamW(model.parameters(), **adamw)
        if kind == "zero2":
            optimizer = shoal.optim.OSS(net.parameters(), AdamW, **adamw)
            return shoal.nn.ShardedDataParallel(net, optimizer), optimizer
        if kind == "megatron":
            return net, shoal.optim.DistributedOptimizer(net, AdamW, **adamw)
        model = shoal.nn.FullyShardedDataParallel(net, auto_wrap_policy=Block)
        return model, shoal.optim.FullyShardedOptimizer(model, AdamW, **adamw)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if library == "shoal":
            for module in [*net.blocks, net]:
                module.set_allocate_memory_from_process_group_for_comm(True)
        return net, AdamW(net.parameters(), **adamw)
    model = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    if kind == "ddp":
        return model, AdamW(model.parameters(), **adamw)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, **adamw)


def run_steps(variant, options):
    """Milliseconds of the steps after the warm-up, and the loss of the last one."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    torch.manual_seed(1)
    model, optimizer = wrapped(variant, *models(options.size))
    data = torch.Generator().manual_seed(dist.get_rank())
    context = SIZES[options.size][3]
    times = []
    for step in range(WARM_UP + options.steps):
        tokens = torch.randint(VOCABULARY, (options.batch, context + 1), generator=data)
        begin = time.perf_counter()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1000 * (time.perf_counter() - begin))
    last = loss.detach().clone()
    dist.all_reduce(last)
    return times[WARM_UP:], last.item() / dist.get_world_size()


def run_collectives():
    """Median microseconds of each collective."""
    import torch
    import torch.distributed as dist

    result = {}
    for name, numel in COLLECTIVES.items():
        tensor = torch.zeros(numel)
        calls = 1000 if numel == 1 else 50
        times = []
        for call in range(calls + calls // 5):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(1e6 * (time.perf_counter() - begin))
        result[name] = statistics.median(times[calls // 5:])
    return result


def worker(variant, options, rank, store, answer):
    """A rank of a variant in Python."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = variant.split()[0].replace("python", "shoal")
    dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=options.ranks)
    if variant.endswith("collectives"):
        result = run_collectives()
    else:
        times, loss = run_steps(variant, options)
        result = {"ms": statistics.median(times), "loss": loss}
    if rank == 0:
        with open(answer, "w") as file:
            json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def run_forked(variant, options, answer):
    """Runs the ranks in processes forked from this one, which has imported PyTorch and does nothing else with it."""
    import shoal  # noqa: F401: registers the backend
    import torch._dynamo  # noqa: F401: which a process's first optimizer imports

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=worker, args=(variant, options, rank, folder + "/store", answer))
            for rank in range(options.ranks)
        ]
        for rank in ranks:
            rank.start()
        end, running = time.monotonic() + 600, ranks
        while running and not any(rank.exitcode for rank in ranks) and time.monotonic() < end:
            multiprocessing.connection.wait([rank.sentinel for rank in running], end - time.monotonic())
            running = [rank for rank in running if rank.is_alive()]
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
    if any(code != 0 for code in codes):
        raise SystemExit("the ranks of %s ended with %s; None was still running" % (variant, codes))


def call(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    if done.returncode != 0:
        raise SystemExit("%s\nended with %d:\n%s%s" % (" ".join(command), done.returncode, done.stdout, done.stderr))


def measure(variant, options):
    answer = options.json + ".part"
    sizes = ["--size", options.size, "--batch", str(options.batch)]
    if variant.startswith("c++"):
        call([options.shoal, "bench", "--train", "--model", "gpt", *sizes, "--strategies", variant.split()[1], "--transports",
              "host", "--rounds", "1", "--steps", str(WARM_UP + options.steps), "--ranks", str(options.ranks), "--json", answer])
        with open(answer) as file:
            return {"ms": json.load(file)["train"][0]["median_ms_per_round"][0]}
    run_forked(variant, options, answer)
    with open(answer) as file:
        return json.load(file)


def row(name, figures, reference, wanted, unit):
    ratio = ""
    if reference:
        ratio = "%.2f" % statistics.median(a / b for a, b in zip(figures, reference))
    return "| %s | %.1f | %.1f | %s | %s |" % (name, statistics.median(figures), min(figures), ratio,
                                              "" if wanted is None else "%.2f" % wanted)


def report(runs, collectives):
    lines = ["| step, ms | median | least | of its reference | wanted |", "| --- | --- | --- | --- | --- |"]
    ms = {name: [run["ms"] for run in list_] for name, list_ in runs.items()}
    for name, (_, _, reference, wanted) in STEPS.items():
        if name in ms:
            lines.append(row(name, ms[name], ms.get(reference), wanted, "ms"))
    lines += ["", "| collective, us | median | least | of gloo's | wanted |", "| --- | --- | --- | --- | --- |"]
    for name, wanted in COLLECTIVES_WANTED.items():
        gloo, own = ([run[name] for run in collectives[backend]] for backend in ("gloo", "shoal"))
        lines += [row("gloo " + name, gloo, None, None, "us"), row("shoal " + name, own, gloo, wanted, "us")]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", default="build/shoal", help="the program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--variants", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--json", default="python_steps.json", help="file for every run's figures")
    options = parser.parse_args()
    runs, collectives = {name: [] for name in options.variants}, {"gloo": [], "shoal": []}
    order = random.Random(1)
    for _ in range(options.rounds):
        for name in order.sample(options.variants, len(options.variants)):
            runs[name].append(measure(name, options))
        for backend in order.sample(list(collectives), 2):
            collectives[backend].append(measure(backend + " collectives", options))
    os.remove(options.json + ".part")
    with open(options.json, "w") as file:
        json.dump({"options": vars(options), "steps": runs, "collectives": collectives}, file, indent=1)
    losses = [run["loss"] for name in runs for run in runs[name] if "loss" in run]
    print("losses of the last step: %.6f to %.6f" % (min(losses), max(losses)))
    print(report(runs, collectives))
    if max(losses) - min(losses) > LOSSES_WITHIN:
        raise SystemExit("the variants do not train alike")


if __name__ == "__main__":
    main()
