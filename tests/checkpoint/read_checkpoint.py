"""A second reader of checkpoints, written from docs/checkpoints.md alone, with nothing but the standard library.

    python read_checkpoint.py FOLDER    prints {tensor: [part, dtype, shape, order, CRC-32 of its elements' bytes]}
"""

import json
import os
import struct
import sys
import zlib

BLOCK = 1 << 20


def read_safetensors(path):
    """{key: (dtype, shape, bytes)}"""
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        data = f.read()
    header.pop("__metadata__", None)
    return {key: (e["dtype"], e["shape"], data[e["data_offsets"][0]:e["data_offsets"][1]]) for key, e in header.items()}


def main():
    folder = sys.argv[1]
    with open(os.path.join(folder, "index.json"), "rb") as f:
        text = f.read()
    index = json.loads(text)
    before, mark, _ = text.rpartition(b',"crc32":"')
    assert mark and zlib.crc32(before) == int(index["crc32"], 16), "the index is damaged"
    assert index["format"] == "shoal-checkpoint" and index["version"] == 1
    files = {}
    for name, size in index["files"].items():
        path = os.path.join(folder, name)
        assert os.path.getsize(path) == size, name
        files[name] = read_safetensors(path)
    result = {}
    for name, tensor in index["tensors"].items():
        numel = 1
        for size in tensor["shape"]:
            numel *= size
        whole, end = b"", 0
        for piece in sorted(tensor["slices"], key=lambda s: s["begin"]):
            assert piece["begin"] == end, "a gap in " + name
            end = piece["end"]
            entire = "order" not in tensor and end - piece["begin"] == numel
            key = name if entire else "%s[%d:%d]" % (name, piece["begin"], end)
            dtype, shape, data = files[piece["file"]].pop(key)
            assert dtype == tensor["dtype"]
            assert shape == (tensor["shape"] if entire else [end - piece["begin"]])
            sums = "".join("%08x" % zlib.crc32(data[i:i + BLOCK]) for i in range(0, len(data), BLOCK))
            assert sums == piece["crc32"], "%s is damaged" % key
            whole += data
        assert end == numel
        result[name] = [tensor["part"], tensor["dtype"], tensor["shape"], tensor.get("order"), zlib.crc32(whole)]
    assert not any(files.values()), "the index does not mention everything"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
