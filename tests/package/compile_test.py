"""Compiles what users compile, without generating code.

    python compile_test.py REPOSITORY BUILD headers|blocks|mistakes|symbols

headers   every public header by itself
blocks    every code block of README.md and docs/*.md
mistakes  programs with the mistakes that users make first: each must fail, with a sentence of ours
symbols   what the libraries define for the linker lies in namespace shoal
"""

import concurrent.futures
import glob
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

# What the blocks take for granted.
CONTEXT = """
#include <shoal/shoal.h>
#include <torch/torch.h>
extern shoal::World world;
extern torch::nn::Sequential model;
extern shoal::DistributedDataParallel<torch::nn::SequentialImpl> parallel;
extern torch::optim::AdamW optimizer;
extern at::Tensor x, y;
extern int64_t step, steps;
extern std::string where_the_data_is;
extern shoal::OptimizerOfNamed make;
extern shoal::DecentralizedDataParallelOptions options;
using torch::nn::functional::cross_entropy;
"""

# (program, part of the message); an empty part: the program is right.
PROGRAMS = [
    ("struct Net : torch::nn::Module { at::Tensor forward(at::Tensor x) { return x; } };\n"
     "void f() { Net net; shoal::%s; }" % wrapper, "a wrapper shares ownership of its module")
    for wrapper in ("DistributedDataParallel parallel(net, world.group())",
                    "DistributedDataParallel<Net> parallel(net, world.group())",
                    "FullyShardedDataParallel parallel(net, world.group())",
                    "ShardedDataParallel parallel(net, sharded, world.group())",
                    "DecentralizedDataParallel parallel(net, make, world.group())")
] + [
    ("void f() { shoal::OSS<torch::optim::Adam> sharded(model->parameters(), 1e-3, world.group()); }", ""),
    ("void f() { shoal::DistributedOptimizer<shoal::Lamb> sharded(model, 1e-3, world.group()); }", ""),
    ("void f() { shoal::OSS<torch::optim::Adam> sharded(model->parameters(), \"fast\", world.group()); }",
     "Pass the options that its own constructor takes"),
    ("at::Tensor f() { return parallel(x); }", ""),
    ("at::Tensor f() { shoal::FullyShardedDataParallel whole(model, world.group()); return whole(x); }", ""),
]


def compile_command(build):
    """The compiler with the flags of a program, without files and without the precompiled header."""
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as f:
        entry = next(e for e in json.load(f) if "/tests/strategy/" in e["command"] or "/tests/strategy/" in e["file"])
    words, kept, skip = shlex.split(entry["command"]), [], False
    for word in words:
        if skip or word in ("-o", "-include", "-c"):
            skip = word in ("-o", "-include")
            continue
        if not word.endswith((".cpp", ".cxx", ".o")) and word != "-Winvalid-pch":
            kept.append(word)
    return [words[0]] + kept[1:] + ["-fsyntax-only", "-O0", "-Wno-unused-variable", "-x", "c++"], entry["directory"]


def messages(build, text):
    """What the compiler says of a program; empty: it is right."""
    command, directory = compile_command(build)
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        done = subprocess.run(command + [f.name], cwd=directory, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode != 0 else ""


def headers(root, build):
    folder = os.path.join(root, "include")
    for path in sorted(glob.glob(os.path.join(folder, "shoal/**/*.h"), recursive=True)):
        name = os.path.relpath(path, folder)
        yield name, "#include <%s>\n#include <%s>\n" % (name, name), lambda said: not said


def blocks(root, build):
    for path in [os.path.join(root, "README.md")] + sorted(glob.glob(os.path.join(root, "docs/*.md"))):
        with open(path, encoding="utf-8") as f:
            found = re.findall(r"```cpp\n(.*?)```", f.read(), re.S)
        for number, block in enumerate(found):
            program = block if "int main" in block else CONTEXT + "void block() {\n%s}\n" % block
            yield "%s, block %d" % (os.path.relpath(path, root), number), program, lambda said: not said


def mistakes(root, build):
    context = CONTEXT + "extern shoal::OSS<torch::optim::SGD> sharded;\n"
    for program, part in PROGRAMS:
        yield program, context + program, (lambda said, part=part: part in said if part else not said)


def symbols(build):
    """Names of functions and variables that are defined for the linker outside of namespace shoal."""
    library = os.path.join(build, "libshoal.so")
    listed = subprocess.run(["nm", "-DC", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    own = r"(vtable for |typeinfo (name )?for |(non-)?virtual thunk to |guard variable for )?shoal::"
    names = re.findall(r"^[0-9a-f]+ [TDBR] (.*)$", listed, re.M)
    foreign = {name for name in names if not re.match(own, name)}
    assert len(names) > len(foreign), "no symbol at all in " + library
    return foreign


def main():
    root, build, what = sys.argv[1:]
    if what == "symbols":
        foreign = symbols(build)
        sys.exit("defined outside of namespace shoal: %s" % ", ".join(sorted(foreign)) if foreign else 0)
    cases = list({"headers": headers, "blocks": blocks, "mistakes": mistakes}[what](root, build))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, _, right), said in zip(cases, pool.map(lambda case: messages(build, case[1]), cases)):
            if not right(said):
                failed += 1
                print("FAILED: %s\n%s\n" % (name, said[:3000] or "the compiler accepts it"))
    print("%d of %d as expected" % (len(cases) - failed, len(cases)))
    sys.exit(failed > 0 or not cases)


if __name__ == "__main__":
    main()
