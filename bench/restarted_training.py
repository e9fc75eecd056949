"""A training as PyTorch lets it outlive its ranks: torchrun starts all of them again, from a checkpoint of every step.

recovery.py starts it:

    torchrun --nproc-per-node 4 --max-restarts 100 bench/restarted_training.py --models REFERENCE --folder FOLDER

Each rank writes its process id to the folder; rank 0 also a checkpoint and a line of metrics after each step.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist


def save(folder, model, optimizer, step):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "checkpoint.part")
    os.replace(folder / "checkpoint.part", folder / "checkpoint")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folder of models.py")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, options.models)
    import models

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (options.folder / f"rank-{rank}").write_text(str(os.getpid()))
    model = models.build(options.model, options.size, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = 0
    if (options.folder / "checkpoint").exists():
        saved = torch.load(options.folder / "checkpoint", mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with open(options.folder / "metrics.jsonl", "a", buffering=1) as metrics:
        while True:
            begin = time.monotonic()
            x, y = models.batch(options.model, options.size, 1, step, rank, 0, options.batch)
            loss = models.loss_of(parallel(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                save(options.folder, model, optimizer, step)
                metrics.write(json.dumps({"step": step, "loss": loss.item(), "step_ms": 1e3 * (time.monotonic() - begin),
                                          "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n")


if __name__ == "__main__":
    main()
