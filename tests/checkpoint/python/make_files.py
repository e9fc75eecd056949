"""Makes the files beside it with the Python package `safetensors` (0.8.0), so that most tests need no Python.

    python make_files.py

Element i of a tensor is (7 i) modulo 120; of "flags" whether that is odd.
"""

import json
import os

import numpy
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "i64": "int64", "i32": "int32", "i16": "int16",
          "i8": "int8", "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8", "c64": "complex64"}


def elements(shape, dtype):
    count = int(numpy.prod(shape))
    return ((7 * numpy.arange(count)) % 120).reshape(shape).astype(dtype)


def main():
    tensors = {name: elements((2, 3, 5), dtype) for name, dtype in DTYPES.items()}
    tensors["flags"] = elements((9,), "int64") % 2 == 1
    tensors["scalar"] = elements((), "float32")
    tensors["empty"] = elements((0, 4), "float32")
    tensors["name with \"quotes\", \u00fc and \n"] = elements((3,), "float32")
    save_file(tensors, os.path.join(HERE, "dtypes.safetensors"), metadata={"made by": "safetensors \u00fc"})
    # A sharded model as Hugging Face's libraries write it.
    save_file({"a.weight": elements((4, 4), "float32")}, os.path.join(HERE, "sharded/model-00001-of-00002.safetensors"),
              metadata={"format": "pt"})
    save_file({"b.bias": elements((4,), "float16"), "b.weight": elements((2, 4), "float32")},
              os.path.join(HERE, "sharded/model-00002-of-00002.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(HERE, "sharded/model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": 104, "more": True},
                   "weight_map": {"a.weight": "model-00001-of-00002.safetensors",
                                  "b.bias": "model-00002-of-00002.safetensors",
                                  "b.weight": "model-00002-of-00002.safetensors"}}, f, indent=2)


if __name__ == "__main__":
    main()
