"""A training as torchft lets it outlive its ranks: the others lose the step in which a rank dies, and go on as a smaller quorum.

recovery.py starts it, in an environment with torchft-nightly:

    python bench/torchft_training.py --ranks 4 --models REFERENCE --folder FOLDER

This process is the lighthouse, which waits for ranks to join for a second in place of a tenth, since ranks that share cores come too late for
each other otherwise, and starts the ranks, each of which is a replica. Each rank writes its process id to
the folder; the first of those that take part writes a line of metrics after each step.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folder of models.py")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, help="this process is one of the ranks")
    parser.add_argument("--lighthouse")
    return parser.parse_args()


def train(options):
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    sys.path.insert(0, options.models)
    import models

    torch.set_num_threads(1)
    (options.folder / f"rank-{options.rank}").write_text(str(os.getpid()))
    model = models.build(options.model, options.size, 1)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=30)), load_state_dict=load,
                      state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, min_replica_size=1, rank=0, world_size=1,
                      replica_id=f"rank_{options.rank}", store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=options.lighthouse,
                      hostname="127.0.0.1")
    parallel = DistributedDataParallel(manager, model, gradient_as_bucket_view=True)
    optimizer = Optimizer(manager, inner)
    with open(options.folder / "metrics.jsonl", "a", buffering=1) as metrics:
        while True:
            begin = time.monotonic()
            step = manager.current_step()
            x, y = models.batch(options.model, options.size, 1, step, options.rank, 0, options.batch)
            optimizer.zero_grad()
            loss = models.loss_of(parallel(x), y)
            loss.backward()
            optimizer.step()
            if manager.current_step() > step and manager.participating_rank() == 0:
                metrics.write(json.dumps({"step": step + 1, "loss": loss.item(), "step_ms": 1e3 * (time.monotonic() - begin),
                                          "ranks": manager.num_participants()}) + "\n")


def launch(options):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), "--lighthouse", lighthouse.address()]) for rank in range(options.ranks)]
    try:
        for rank in ranks:
            rank.wait()
    except KeyboardInterrupt:
        pass
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        lighthouse.shutdown()


if __name__ == "__main__":
    options = parsed()
    launch(options) if options.rank is None else train(options)
