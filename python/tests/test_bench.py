"""PY11: bench/python_steps.py measures what its table says. Times themselves are measured by hand, never in a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "python_steps.py"
VARIANTS = ["gloo fsdp2", "shoal fsdp2", "c++ fsdp", "python fsdp"]


def run(tmp_path, *arguments):
    if "SHOAL_PROGRAM" not in os.environ:
        pytest.skip("the program is not built")
    command = [sys.executable, SCRIPT, "--shoal", os.environ["SHOAL_PROGRAM"], "--json", tmp_path / "runs.json",
               "--size", "tiny", "--steps", "2", "--rounds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_PY11_each_variant_is_measured_beside_its_reference(tmp_path):
    done = run(tmp_path, "--variants", *VARIANTS)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert list(runs["steps"]) == VARIANTS
    losses = [runs["steps"][name][0]["loss"] for name in VARIANTS if name != "c++ fsdp"]
    assert max(losses) - min(losses) < 1e-4 and 5.4 < losses[0] < 5.7  # ln 256 = 5.55, of random tokens
    assert all(run["ms"] > 0 for name in VARIANTS for run in runs["steps"][name])
    assert all(us > 0 for backend in ("gloo", "shoal") for us in runs["collectives"][backend][0].values())
    rows = {line.split("|")[1].strip(): line.split("|") for line in done.stdout.splitlines() if line.startswith("|")}
    for name, reference in (("shoal fsdp2", "gloo fsdp2"), ("python fsdp", "c++ fsdp")):
        ratio = runs["steps"][name][0]["ms"] / runs["steps"][reference][0]["ms"]
        assert rows[name][4].strip() == f"{ratio:.2f}"


def test_PY11_a_variant_that_fails_ends_the_run_with_its_output(tmp_path):
    done = run(tmp_path, "--variants", "c++ ddp", "--ranks", "0")
    assert done.returncode != 0 and "--ranks" in done.stderr, done.stdout + done.stderr
