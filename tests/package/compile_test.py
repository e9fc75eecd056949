"""Compiles what users compile, without generating code.

    python compile_test.py REPOSITORY BUILD headers|blocks|mistakes|symbols

headers   every public header by itself
blocks    every code block of README.md and of the pages in docs and its folders
mistakes  the mistakes that users make first: each must fail, with a sentence of ours
symbols   what the library defines for the linker lies in namespace shoal
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

import docs

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
extern shoal::OptimizerRecipe recipe;
extern shoal::DecentralizedDataParallelOptions options;
using torch::nn::functional::cross_entropy;
"""

# Each mistake has a class of its own: the compiler says a sentence once for each type.
NET = "struct Net%d : torch::nn::Module { at::Tensor forward(at::Tensor x) { return x; } } net%d;"

# Bodies of functions that must not compile, and what the compiler must say.
MISTAKES = [("shoal::%s;" % wrapper, "a wrapper shares ownership of its module") for wrapper in (
    "DistributedDataParallel parallel(net%d, world.group())",
    "DistributedDataParallel<Net%d> parallel(net%d, world.group())",
    "FullyShardedDataParallel parallel(net%d, world.group())",
    "ShardedDataParallel parallel(net%d, sharded, world.group())",
    "DecentralizedDataParallel parallel(net%d, recipe, world.group())",
    "DistributedOptimizer<torch::optim::SGD> optimizer(net%d, 0.1, world.group())",
    "make_training(\"ddp\", net%d, shoal::optimizer_recipe<torch::optim::SGD>(0.1), world.group())")] + [
    ("shoal::OSS<torch::optim::Adam> sharded(model->parameters(), \"fast\", world.group());",
     "Pass the options that its own constructor takes"),
    ("shoal::split_by_decay(nullptr);", "nullptr is no module")]

# What users write as well, and what works.
RIGHT = [
    "shoal::OSS<torch::optim::Adam> sharded(model->parameters(), 1e-3, world.group());",
    "shoal::DistributedOptimizer<shoal::Lamb> sharded(model, 1e-3, world.group());",
    "parallel(x).sum().backward();",
    "model = shoal::convert_sync_batch_norm(model, world.group());",
    "shoal::OSS<torch::optim::Adam> sharded(model->parameters(), 1e-3, world.group()); "
    "sharded.load_state_dict(model, sharded.state_dict(model, 0));",
    "shoal::load_optimizer_state(optimizer, model, shoal::optimizer_state(optimizer, model));",
    "const auto [groups, defaults] = shoal::decay_groups(model, torch::optim::AdamWOptions(1e-3));",
    "shoal::split_by_decay(model); shoal::MuonWithAdamW::groups_of(model);",
    "const torch::nn::Sequential fixed; const auto& same = model; shoal::split_by_decay(fixed); "
    "shoal::split_by_decay(same); shoal::split_by_decay(torch::nn::Linear(2, 3)); "
    "shoal::split_by_decay(torch::nn::LinearImpl(2, 3)); shoal::split_by_decay(std::as_const(*model)); "
    "shoal::split_by_decay(model.ptr()); shoal::split_by_decay(model.get()); "
    "shoal::split_by_decay(std::shared_ptr<const torch::nn::Module>(model.ptr())); "
    "shoal::decay_groups(model.ptr(), torch::optim::AdamWOptions(1e-3));",
    "struct Net : torch::nn::Module { auto split() { return shoal::split_by_decay(this); } auto groups() const "
    "{ return shoal::decay_groups(*this, torch::optim::AdamWOptions(1e-3)); } auto state(shoal::OSS<torch::optim::SGD>& "
    "sharded) const { return sharded.state_dict(*this); } auto state() const { return shoal::optimizer_state(optimizer, this); "
    "} };",
    "auto split = shoal::split_by_decay; split(*model); split(std::cref(*model)); "
    "std::function<shoal::DecaySplit(const torch::nn::Module&)> same = shoal::split_by_decay;",
    "shoal::optimizer_recipe<shoal::MuonWithAdamW>(shoal::MuonOptions(1e-3), shoal::MuonWithAdamW::groups_of);",
    "std::function<shoal::OptimizerState(const torch::optim::Optimizer&, const torch::nn::Module&)> state = "
    "shoal::optimizer_state; std::bind(shoal::optimizer_state, std::cref(optimizer), std::cref(*model))(); "
    "std::bind(shoal::load_optimizer_state, std::ref(optimizer), std::cref(*model), state(optimizer, *model), "
    "shoal::StateDtypes::kept)();",
    "auto convert = shoal::convert_sync_batch_norm; model = convert(model, world.group()); "
    "std::function<std::shared_ptr<torch::nn::Module>(const std::shared_ptr<torch::nn::Module>&, const shoal::Group&)> "
    "same = shoal::convert_sync_batch_norm;",
    "torch::nn::Sequential first, second; shoal::DistributedOptimizer<shoal::FusedAdamW> "
    "sharded({first, second}, torch::optim::AdamWOptions(1e-3), world.group());",
    "shoal::FullyShardedDataParallel whole(model, world.group()); whole(x).sum().backward();",
]


def compile_command(build, precompiled):
    """The compiler with the flags of a test, without its files; precompiled: with the tests' precompiled header."""
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as f:
        entry = next(e for e in json.load(f) if "/tests/strategy/" in e["command"] or "/tests/strategy/" in e["file"])
    words, kept = shlex.split(entry["command"]), []
    for word, before in zip(words, [""] + words):
        if word == "-include" or before == "-include":
            if precompiled:
                kept.append(word)
        elif word not in ("-o", "-c", "-Winvalid-pch") and not word.endswith((".cpp", ".cxx", ".o")):
            kept.append(word)
    return kept + ["-fsyntax-only", "-Wno-unused-variable", "-x", "c++"], entry["directory"]


def messages(build, text, precompiled):
    """What the compiler says of a program; empty: it is right."""
    command, directory = compile_command(build, precompiled)
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        done = subprocess.run(command + [f.name], cwd=directory, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode != 0 else ""


def function(name, body):
    """A function whose lines count in a file of this name."""
    return '#line 1 "%s"\nvoid %s() {\n%s\n}\n' % (name, re.sub(r"\W", "_", name), body)


def headers(root, build):
    folder = os.path.join(root, "include")
    names = [os.path.relpath(path, folder) for path in sorted(glob.glob(os.path.join(folder, "shoal/*.h")))]
    programs = ["#include <%s>\n#include <%s>\n" % (name, name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [said for said in pool.map(lambda program: messages(build, program, False), programs) if said]


def blocks(root, build):
    program, count = CONTEXT, 0
    for page in docs.pages(root):
        for block in docs.blocks(root, page, "cpp"):
            code = block.code
            if "int main" in code:  # a program of its own
                code = re.sub(r"#include .*\n", "", code).replace("int main() {", "").rstrip().removesuffix("}")
            program += function("%s, block %d" % (page, block.number), code)
            count += 1
    assert count > 20, "%d blocks" % count
    said = messages(build, program, True)
    return [said] if said else []


def mistakes(_root, build):
    context = CONTEXT + "extern shoal::OSS<torch::optim::SGD> sharded;\n"
    right = messages(build, context + "".join(function("right_%d" % i, body) for i, body in enumerate(RIGHT)), True)
    wrong = "".join((NET + "\n%s") % (i, i, function("mistake_%d" % i, body.replace("%d", str(i))))
                    for i, (body, _) in enumerate(MISTAKES))
    said = messages(build, context + wrong, True)
    faults = [right] if right else []
    # GCC names the place and then the error, Clang the error, with the type, and then mostly the place.
    sentence = r'error: static(?: assertion failed: |_assert failed[^"\n]*")shoal: '
    if len(re.findall(sentence, said)) != len(MISTAKES):
        faults.append("not one sentence for each of %d mistakes:\n%s" % (len(MISTAKES), said))
    for i, (body, part) in enumerate(MISTAKES):
        place, error = r"mistake_%d:\d+:" % i, r"%s[^\n]*%s" % (sentence, part)
        by_type = r"<Net%d &>[^\n]*shoal: [^\n]*%s" % (i, part)
        after = r"%s(?:(?!error: )[^\0])*?%s" % (error, place)
        if not re.search("|".join([r"%s[^\0]*?%s" % (place, error), after, by_type]), said):
            faults.append("%s\n%s" % (body, said or "the compiler accepts it"))
    return faults


def symbols(_root, build):
    library = os.path.join(build, "lib", "libshoal.so")
    listed = subprocess.run(["nm", "-DC", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    own = r"(vtable for |typeinfo (name )?for |(non-)?virtual thunk to |guard variable for )?shoal::"
    names = set(re.findall(r"^[0-9a-f]+ [TDBR] (.*)$", listed, re.M)) - {"__bss_start", "_edata", "_end"}
    foreign = sorted(name for name in names if not re.match(own, name))
    assert len(names) > len(foreign), "no symbol at all in " + library
    return ["defined outside of namespace shoal: " + name for name in foreign]


def main():
    root, build, what = sys.argv[1:]
    faults = {"headers": headers, "blocks": blocks, "mistakes": mistakes, "symbols": symbols}[what](root, build)
    print("\n".join(faults) or what + ": as they should be")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
