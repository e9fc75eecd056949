"""PY10: the extension's stub names everything that the extension has, and strictly typed programs can use the package."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal import _C

REPOSITORY = Path(__file__).resolve().parents[2]
STUB = REPOSITORY / "python" / "shoal" / "_C.pyi"
EXAMPLES = [
    path
    for path in sorted((REPOSITORY / "examples" / "python").glob("*.py"))
    if not path.stem.startswith("with_") or importlib.util.find_spec(path.stem.removeprefix("with_")) is not None
]

MISTAKES = """
import torch
import shoal
net = torch.nn.Linear(1, 1)
model = shoal.nn.DistributedDataParallel(net)
norm: str = shoal.nn.FullyShardedDataParallel(net).clip_grad_norm_(1.0)
shoal.checkpoint.save("run", model)
shoal.distributed.group_of().size = 3
shoal.checkpoint.load_latest("run", shoal.checkpoint.TrainingState(model)).step
"""


def members(names):
    return {name for name in names if not name.startswith("_")}


def test_PY10_the_stub_names_what_the_extension_has():
    nodes = ast.parse(STUB.read_text()).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    shared = {name: classes.pop(name) for name in [*classes] if name.startswith("_")}  # of several classes' methods
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert functions == {name for name in members(vars(_C)) if inspect.isroutine(getattr(_C, name))}
    assert set(classes) == {name for name in members(vars(_C)) if inspect.isclass(getattr(_C, name))}
    for name, node in classes.items():
        bases = [base.id for base in node.bases]
        bodies = [node.body, *(shared[base].body for base in bases if base in shared)]
        methods = {entry.name for body in bodies for entry in body if isinstance(entry, ast.FunctionDef)}
        methods |= {entry.target.id for entry in node.body if isinstance(entry, ast.AnnAssign)}
        assert members(methods) == members(vars(getattr(_C, name))), name
        assert [base for base in bases if base not in shared] == [
            base.__name__ for base in getattr(_C, name).__bases__ if base.__module__ != "pybind11_builtins"
        ]


# Of what these packages and PyTorch's compiler import, nothing says what types a program's calls of shoal and torch have,
# and to analyse it takes five times as long as all else.
SKIPPED = """
[mypy]
[mypy-accelerate.*,deepspeed.*,lightning.*,transformers.*,sympy.*]
follow_imports = skip
[mypy-torch._dynamo.*,torch._inductor.*,torch._functorch.*,torch._decomp.*,torch._prims.*,torch._refs.*,torch._export.*]
follow_imports = skip
[mypy-torch.ao.*,torch.export.*,torch.fx.*,torch.onnx.*,torch.testing._internal.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says of the examples and of a program with mistakes, in one run."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("no mypy: scripts/setup --tests installs it where it is to be had")
    folder = tmp_path_factory.mktemp("mypy")
    mistakes, config = folder / "mistakes.py", folder / "mypy.ini"
    mistakes.write_text(MISTAKES)
    config.write_text(SKIPPED)
    environment = {**os.environ, "MYPYPATH": str(Path(shoal.__file__).parent.parent)}
    # Functions of PyTorch without types, such as Tensor.backward, are not a program's fault.
    options = ["--strict", "--untyped-calls-exclude=torch", "--ignore-missing-imports", "--follow-imports=silent",
               "--no-incremental", "--cache-dir", os.devnull, "--config-file", config]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, options), *map(str, EXAMPLES), str(mistakes)],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # it has found mistakes; 2 if it has not checked
    return done.stdout


def test_PY10_examples_are_strictly_typed(said):
    assert f"in 1 file (checked {len(EXAMPLES) + 1} source files)" in said, said
    assert not [line for line in said.splitlines() if "error:" in line and "mistakes.py" not in line], said


def test_PY10_mistakes_are_found_without_running(said):
    for line in (6, 7, 8, 9):
        assert f"mistakes.py:{line}: error" in said, said


def is_error(thing):
    return inspect.isclass(thing) and issubclass(thing, shoal.Error)


def test_PY10_what_is_public_has_a_docstring():
    modules = (shoal, shoal.amp, shoal.checkpoint, shoal.distributed, shoal.hooks, shoal.nn, shoal.optim)
    without = []
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)) or is_error(thing):
                continue
            if not thing.__doc__:
                without.append(f"{module.__name__}.{name}")
            if inspect.isclass(thing):
                own = {key: value for key, value in vars(thing).items() if inspect.isfunction(value)}
                without += [
                    f"{module.__name__}.{name}.{key}"
                    for key, value in own.items()
                    if not key.startswith("_") and not inspect.getdoc(getattr(thing, key))
                ]
    assert without == []
