"""Turns the file of `shoal train --metrics` into TensorBoard's event files.

    pip install tensorboard
    python scripts/metrics_to_tensorboard.py metrics.jsonl runs/first     # then: tensorboard --logdir runs

Every number of a line becomes a scalar at the line's step. A file that is still growing can be converted again: the
folder must be empty or absent each time.
"""

import argparse
import json
import os
import sys

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def convert(source, folder):
    """Returns the number of scalars written. ValueError names the line that is not one of shoal's."""
    if os.path.isdir(folder) and os.listdir(folder):
        raise ValueError(f"{folder} is not empty")
    with open(source, encoding="utf-8") as lines:
        writer = EventFileWriter(folder)
        count = 0
        for number, text in enumerate(lines, 1):
            if not text.endswith("\n"):
                break  # being written at this moment
            line = json.loads(text)
            if not isinstance(line, dict) or "step" not in line:
                raise ValueError(f"{source}, line {number}: no step")
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.items()
                      if name not in ("step", "seconds") and isinstance(value, (int, float))]
            writer.add_event(Event(step=line["step"], wall_time=line.get("seconds", 0), summary=Summary(value=values)))
            count += len(values)
        writer.close()
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("metrics")
    parser.add_argument("folder")
    options = parser.parse_args()
    try:
        print(convert(options.metrics, options.folder), "scalars")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
