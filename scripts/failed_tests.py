#!/usr/bin/env python3
"""Prints the end of each failed test's output, after a run of ctest: scripts/failed_tests.py BUILD."""

import pathlib
import re
import sys

LINES = 40  # of each test


def main() -> None:
    folder = pathlib.Path(sys.argv[1], "Testing", "Temporary")
    failed = [line.split(":", 1)[1] for line in (folder / "LastTestsFailed.log").read_text().splitlines()]
    log = (folder / "LastTest.log").read_text(errors="replace")
    for name in failed:
        # "3/600 Testing: NAME", header, output, "Test time = ..."
        found = re.search(rf"^\d+/\d+ Testing: {re.escape(name)}$(.*?)^Test time =", log, re.MULTILINE | re.DOTALL)
        lines = found.group(1).strip().splitlines() if found else ["no output"]
        told = [line for line in lines if re.search(r"Failure$|\[  FAILED  \]|Error|exception|rank \d+ ", line)]
        print(f"\n== {name}", *(told or lines)[:LINES], "-- its end:", *lines[-10:], sep="\n")


if __name__ == "__main__":
    main()
