"""Checkpoints as Python libraries leave them, for import_test.cpp.

    python make_foreign.py FOLDER    makes FOLDER/dcp, written by two ranks, FOLDER/args (with an object in it), FOLDER/oss.pt,
                                     FOLDER/megatron.pt and FOLDER/args.pt; prints {checkpoint: {tensor: [dtype, shape, CRC-32 of its bytes]}}
"""

import argparse
import collections
import json
import os
import sys
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.int64: "Long", torch.uint8: "Byte"}


def tensors():
    random = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=random)
    return {
        "model.fc.weight": normal(37, 11),
        "model.fc.bias": normal(37).bfloat16(),
        "model.emb": normal(300, 1000),
        "model.steps": torch.tensor(7),
        "optimizer.state.fc.weight.exp_avg": normal(37, 11),
    }


def describe(flat):
    crc = lambda t: zlib.crc32(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {name: [NAMES[t.dtype], list(t.shape), crc(t)] for name, t in flat.items()}


def nest(flat):
    result = {}
    for name, tensor in flat.items():
        first, rest = name.split(".", 1)
        result.setdefault(first, {})[rest] = tensor
    return result


def save_distributed(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    sharded = {name: distribute_tensor(t, mesh, [Shard(0)]) if t.dim() else t for name, t in tensors().items()}
    dcp.save({**nest(sharded), "scheduler": {"gamma": 0.5, "milestones": [3, 4]}}, checkpoint_id=folder + "/dcp")
    dist.barrier()
    dcp.save({"weight": sharded["model.fc.weight"], "args": argparse.Namespace(lr=1)}, checkpoint_id=folder + "/args")
    dist.destroy_process_group()


def main():
    folder = sys.argv[1]
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            save_distributed(rank, folder)
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    # What OSS.state_dict() returns: PyTorch's own optimizer state, by number.
    moments = [torch.randn(5, 3), torch.randn(8)]
    oss = {"state": {i: {"step": torch.tensor(4), "exp_avg": m, "exp_avg_sq": m * m} for i, m in enumerate(moments)},
           "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}]}
    torch.save(oss, folder + "/oss.pt")
    # What Megatron-LM's model and parameter state look like: nested, tied, a transposed view, dtypes as keys.
    tied = torch.randn(6, 4)
    buffers = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {"param": torch.randn(9), "numel_unpadded": 9}}}
    model = collections.OrderedDict(embedding=tied, output=tied, transposed=torch.randn(4, 6).t())
    torch.save({"model": {"language_model": model}, "iteration": 100, "buffers": buffers}, folder + "/megatron.pt")
    torch.save({"weight": tied, "args": argparse.Namespace(lr=1)}, folder + "/args.pt")
    print(json.dumps({
        "dcp": describe(tensors()),
        "oss.pt": describe({f"state.{i}.{k}": v for i, s in oss["state"].items() for k, v in s.items()}),
        "megatron.pt": describe({**{"model.language_model." + k: v for k, v in model.items()},
                                 "buffers.0.(torch.bfloat16, torch.float32).param":
                                 buffers[0][(torch.bfloat16, torch.float32)]["param"]}),
        "args.pt": describe({"weight": tied}),
    }))


if __name__ == "__main__":
    main()
