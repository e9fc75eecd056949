"""Turns the file of `shoal train --metrics` into a TensorBoard event file. Needs nothing but Python.

    python scripts/metrics_to_tensorboard.py metrics.jsonl runs/first     # then: tensorboard --logdir runs

Every number of a line becomes a scalar at the line's step; null and the words NaN, Infinity and -Infinity are numbers, as for
`shoal report`, and what float32 cannot hold is infinite. Lines that are not JSON or have no step are left out with a
note, as by `shoal top` and `shoal report`. A file that is still growing can be converted again: the
folder must be empty or absent each time.

An event file is a sequence of records, [length: 8 bytes | its checksum | data | its checksum], little-endian, whose data
are protocol buffers of the type Event (tensorflow/core/util/event.proto).
"""

import argparse
import json
import math
import os
import struct
import sys
import time

CRC_TABLE = []
for index in range(256):
    for _ in range(8):
        index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
    CRC_TABLE.append(index)


def masked_crc32c(data):
    """CRC-32C as TFRecord files have it: rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def varint(number):
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def chunk(field, data):
    """A field of bytes, text or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def version_event(wall_time):
    return b"\x09" + struct.pack("<d", wall_time) + chunk(3, b"brain.Event:2")


def scalar_event(wall_time, step, scalars):
    values = b"".join(chunk(1, chunk(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars)
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step) + chunk(5, values)


def as_number(value):
    """None where it is no number."""
    if value is None or isinstance(value, str):
        return {None: math.nan, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    if not isinstance(value, (int, float)):
        return None
    largest = 3.4028234663852886e38
    return math.copysign(math.inf, 1 if value > 0 else -1) if abs(value) > largest else float(value)


def convert(source, folder):
    """Returns the number of scalars written and notes on lines that are left out. ValueError if all are."""
    if os.path.isdir(folder) and os.listdir(folder):
        raise ValueError(f"{folder} is not empty")
    records, count, left_out = [version_event(0)], 0, []
    with open(source, encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = None
            if line is None and not text.endswith("\n"):
                break  # being written at this moment
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                left_out.append(f"{source}: line {number}: " + ("not JSON" if line is None else "no step"))
                continue
            scalars = [(tag, value) for tag, value in ((tag, as_number(value)) for tag, value in line.items()
                                                       if tag not in ("step", "seconds")) if value is not None]
            seconds = as_number(line.get("seconds"))
            wall_time = seconds if seconds is not None and math.isfinite(seconds) else 0.0
            records.append(scalar_event(wall_time, line["step"], scalars))
            count += len(scalars)
    if left_out and len(records) == 1:
        raise ValueError(left_out[0])
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"events.out.tfevents.{int(time.time())}.shoal"), "wb") as file:
        for data in records:
            file.write(record(data))
    return count, left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("metrics")
    parser.add_argument("folder")
    options = parser.parse_args()
    try:
        count, left_out = convert(options.metrics, options.folder)
        if left_out:
            others = "the line is left out" if len(left_out) == 1 else f"it and {len(left_out) - 1} more are left out"
            print(f"{left_out[0]}; {others}", file=sys.stderr)
        print(count, "scalars")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
