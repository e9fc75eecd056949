"""Converts checkpoints of Python libraries to safetensors; tensors keep their names.

    python scripts/import_checkpoint.py SOURCE OUTPUT

SOURCE  a folder of torch.distributed.checkpoint (FSDP; Megatron-core's "torch_dist"), or a file of torch.save (fairscale's OSS
        after consolidate_state_dict(), Megatron-LM, plain PyTorch), read by PyTorch itself.
OUTPUT  a new folder with model.safetensors, or, where it would be larger than --shard-gb, with several files and their index,
        as shoal and Hugging Face's libraries open it; and other.json with whatever is not a tensor. `shoal checkpoint reshard
        OUTPUT RUN --ranks N` makes a checkpoint with checksums of it.

A tensor's name are the keys that lead to it, joined by dots: state.0.exp_avg, model.fc.weight. Tensors that share memory are
written twice. Memory: one of the output's files, at most --shard-gb or one tensor; files in the format before PyTorch 1.6: all.
Needs torch and safetensors, and with --trust the libraries whose objects SOURCE holds.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import sys
import zipfile

import torch
from safetensors.torch import save_file


def holds_tensors(value):
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and any(map(holds_tensors, value))


def flatten(name, value, tensors, others):
    """Enters containers down to tensors; what has none in it stays one value."""
    if isinstance(value, torch.Tensor) or not holds_tensors(value):
        target = tensors if isinstance(value, torch.Tensor) else others
        if name in tensors or name in others:
            sys.exit(f"two entries have the name {name}")
        target[name] = value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        flatten(f"{name}.{key}" if name else str(key), item, tensors, others)


def refuse(source, error):
    found = re.search(r"GLOBAL (\S+)", str(error))
    sys.exit(f"{source} holds {found[1] if found else 'objects'} beside tensors and plain values. --trust reads it, and runs "
             "whatever code the file asks for: only for files that you trust like a program")


class TorchFile:
    """What torch.save wrote. Tensors are mapped until they are needed."""

    def __init__(self, path, trust):
        try:
            content = torch.load(path, map_location="cpu", weights_only=not trust, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            refuse(path, error)
        self.tensors, self.others = {}, {}
        flatten("", content, self.tensors, self.others)
        self.bytes = {name: tensor.nbytes for name, tensor in self.tensors.items()}

    def load(self, names):
        return {name: self.tensors[name] for name in names}


class DistributedFolder:
    """A folder of torch.distributed.checkpoint. Its .metadata is a pickle, which PyTorch has no safe way to read."""

    def __init__(self, path, trust):
        from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        class Values(DefaultLoadPlanner):
            def load_bytes(self, item, value):
                try:
                    read[item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=not trust)
                except pickle.UnpicklingError as error:
                    refused.append(error)

        self.path, read, refused = path, {}, []
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        self.stored = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        rest = {name: None for name in entries if name not in self.stored}
        if rest:
            load(rest, storage_reader=FileSystemReader(path), planner=Values(), no_dist=True)
        if refused:
            refuse(path, refused[0])
        self.tensors, self.others = {}, {}  # tensors within values
        for name, value in read.items():
            flatten(name, value, self.tensors, self.others)
        self.bytes = {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in self.stored.items()}
        self.bytes |= {name: tensor.nbytes for name, tensor in self.tensors.items()}

    def load(self, names):
        from torch.distributed.checkpoint import FileSystemReader, load
        wanted = {name: torch.empty(self.stored[name].size, dtype=self.stored[name].properties.dtype)
                  for name in names if name in self.stored}
        if wanted:
            load(wanted, storage_reader=FileSystemReader(self.path), no_dist=True)
        return wanted | {name: self.tensors[name] for name in names if name in self.tensors}


def plain(name, tensor):
    """A copy that shares memory with nothing."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        sys.exit(f"{name}: a {type(tensor).__name__} of layout {tensor.layout} has no form in safetensors; "
                 "save it dense and whole")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def files_of(sizes, limit):
    """Lists of names, filled in alphabetical order."""
    files, filled = [], 0
    for name in sorted(sizes):
        if not files or filled + sizes[name] > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += sizes[name]
    return files


def write(source, prefix, limit, folder):
    sizes = {name: size for name, size in source.bytes.items() if name.startswith(prefix)}
    if not sizes:
        sys.exit(f"no tensor's name begins with {prefix}" if prefix else "there are no tensors in it")
    files, weight_map = files_of(sizes, limit), {}
    for i, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        tensors = {name[len(prefix):]: plain(name, tensor) for name, tensor in source.load(names).items()}
        save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(sizes.values())
    if len(files) > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as index:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
    print(f"{len(sizes)} tensors, {total / 2**20:.3f} MiB in {len(files)} files")


def write_others(source, folder):
    kept, left = {}, []
    for name, value in source.others.items():
        try:
            json.dumps(value)
            kept[name] = value
        except (TypeError, ValueError):
            left.append(f"{name} ({type(value).__name__})")
    with open(os.path.join(folder, "other.json"), "w", encoding="utf-8") as file:
        json.dump(kept, file, indent=2)
    print(f"{len(kept)} other values in other.json" + (", left out: " + ", ".join(left) if left else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("output")
    parser.add_argument("--prefix", default="", help="take only tensors whose names begin so, and take that off: model.")
    parser.add_argument("--shard-gb", type=float, default=5, help="largest file, in units of 10^9 bytes (%(default)s)")
    parser.add_argument("--trust", action="store_true", help="also read objects that are more than tensors and plain values")
    options = parser.parse_args()
    if not options.shard_gb > 0:
        sys.exit(f"--shard-gb {options.shard_gb}: give more than 0")
    if os.path.exists(options.output):
        sys.exit(f"{options.output} exists; give a new folder")
    if os.path.isfile(os.path.join(options.source, ".metadata")):
        source = DistributedFolder(options.source, options.trust)
    elif os.path.isfile(options.source):
        source = TorchFile(options.source, options.trust)
    else:
        sys.exit(f"{options.source} is neither a file nor a folder of torch.distributed.checkpoint, which has a .metadata")
    unfinished = f"{options.output.rstrip('/')}.tmp-{os.getpid()}"
    os.makedirs(unfinished)
    try:
        write(source, options.prefix, options.shard_gb * 1e9, unfinished)
        write_others(source, unfinished)
        os.rename(unfinished, options.output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    main()
