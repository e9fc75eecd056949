"""Checks the structure of the sources: layers, cycles, lengths, and what may be named only in one place.

    python check.py REPOSITORY    prints one line per violation; exit code 1 if there is any
"""

import functools
import os
import re
import sys

import file_names
import lengths

# May include only what stands before it in its line. Lines are alternatives to each other where layers are unrelated.
ORDER = ["base", "layout", "memory", "comm", "module", "checkpoint", "optim", "engine", "strategy", "training", "planning"]
ALLOWED = {layer: set(ORDER[:i + 1]) for i, layer in enumerate(ORDER)}
ALLOWED["loop"] = {"base", "comm", "loop"}
ALLOWED["elastic"] = set(ORDER[:ORDER.index("strategy") + 1]) | {"loop", "elastic"}
ALLOWED["launch"] = {"base", "comm", "launch"}
ALLOWED["models"] = {"base", "models"}
ALLOWED["data"] = {"base", "models", "data"}
ALLOWED["cli"] = set(ORDER) | {"loop", "elastic", "launch", "models", "data", "cli"}
# Public headers are flat. Each belongs to the lowest layer that may include it.
HEADERS = {
    "bench": "planning",
    "call": "comm",
    "call_log": "comm",
    "checkpoint": "engine",
    "clock": "base",
    "data": "loop",
    "data_parallel": "engine",
    "ddp": "strategy",
    "decentralized": "strategy",
    "deferred_init": "module",
    "elastic": "elastic",
    "elastic_training": "engine",
    "error": "base",
    "forward_tensors": "engine",
    "fsdp": "strategy",
    "group": "comm",
    "hooks": "engine",
    "host_shared_buffer": "comm",
    "inputs": "engine",
    "join": "engine",
    "local_optimizer": "base",
    "local_updates": "strategy",
    "mean_parameters": "engine",
    "megatron": "strategy",
    "metrics": "loop",
    "module_ref": "module",
    "optim": "optim",
    "optimizer_base": "optim",
    "optimizer_in_backward": "strategy",
    "optimizer_recipe": "optim",
    "optimizer_state": "optim",
    "plan": "planning",
    "precision": "optim",
    "progress": "loop",
    "range": "layout",
    "schedules": "optim",
    "shard_gossip": "strategy",
    "sharded_optimizer": "engine",
    "strategy": "training",
    "sync_batch_norm": "module",
    "telemetry": "comm",
    "topology": "comm",
    "training": "training",
    "world": "comm",
    "wrap_policy": "module",
    "zero": "strategy",
}
# A header of a strategy that is not named after it.
STRATEGIES = {"optimizer_in_backward": "ddp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/', re.S)


def sources(root):
    """{path relative to the repository: text} of all headers and sources."""
    result = {}
    for top in ("include/shoal", "src"):
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                if name.endswith((".h", ".cpp")):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as f:
                        result[os.path.relpath(path, root)] = f.read()
    return result


def header_of(path):
    """'ddp' of include/shoal/ddp.h, 'call' of include/shoal/detail/call.h; None of a source."""
    return os.path.splitext(os.path.basename(path))[0] if path.startswith("include/") else None


def layer_of(path):
    """'comm' of src/comm/x.cpp and of a public header of that layer; None of files above all layers."""
    header = header_of(path)
    if header is not None:
        return HEADERS.get(header)
    parts = path.split("/")[1:]
    return parts[0] if len(parts) > 1 else None


def resolve(include, files):
    """The project's file that an include means, or None."""
    for candidate in ("include/" + include, "src/" + include):
        if candidate in files:
            return candidate
    return None


def cycles(graph):
    """The cycles, each from a node to itself."""
    found, done, path = [], set(), []

    def visit(node):
        if node in path:
            found.append(path[path.index(node):] + [node])
            return
        if node in done:
            return
        path.append(node)
        for target in sorted(graph[node]):
            visit(target)
        path.pop()
        done.add(node)

    for node in sorted(graph):
        visit(node)
    return found


def check_cycles(graph):
    """Cycles of files that include each other."""
    return ["include cycle: " + " -> ".join(cycle) for cycle in cycles(graph)]


ENGINE = "src/engine/"


def check_folders(graph):
    """Cycles of folders of the engine, each with an include for every arrow."""
    folders, example = {}, {}
    for path, targets in sorted(graph.items()):
        for target in targets:
            if path.startswith(ENGINE) and target.startswith(ENGINE):
                source, used = (name[len(ENGINE):].split("/")[0] for name in (path, target))
                folders.setdefault(source, set()).update({used} - {source})
                folders.setdefault(used, set())
                example.setdefault((source, used), "%s includes %s" % (path, target))
    for cycle in cycles(folders):
        yield "cycle of folders: %s (%s)" % (" -> ".join(cycle), ", ".join(example[step] for step in zip(cycle, cycle[1:])))


# Strategies that are made of others, and of which.
COMPOSED = {"shard_gossip": ("decentralized", "fsdp")}


def strategy_of(path):
    """'zero' of src/strategy/zero/oss.cpp and include/shoal/zero.h."""
    header = header_of(path)
    if header is not None:
        return STRATEGIES.get(header, header)
    return os.path.splitext(path.split("strategy/", 1)[1].split("/")[0])[0]


def check_layers(path, target):
    """A violation of the order of layers, or None."""
    source, used = layer_of(path), layer_of(target)
    if path.startswith("include/") and target.startswith("src/"):
        return "%s: a public header includes %s of src/" % (path, target)
    if header_of(path) not in (None, "shoal") and source is None:
        return "%s: HEADERS in check.py does not say to which layer it belongs" % path
    if source is None or used is None:
        return None
    if source not in ALLOWED:
        return "%s: layer '%s' is not in the order of layers" % (path, source)
    if used not in ALLOWED[source]:
        return "%s: upward include of %s" % (path, target)
    if source == used == "strategy":
        mine, other = strategy_of(path), strategy_of(target)
        if mine != other and other not in COMPOSED.get(mine, ()):
            return "%s: a strategy includes another, %s" % (path, target)
    return None


def check_names(path, text):
    """Violations of what may be named only in one place."""
    if re.search(r"\bc10d\b|torch/csrc/distributed", text) and layer_of(path) != "comm":
        yield "%s: c10d outside comm/" % path
    if re.search(r"\b(secure_)?getenv\b", text) and path != "src/base/environment.cpp":
        yield "%s: getenv outside src/base/environment.cpp" % path
    if re.search(r"\busing\s+\w+\s*=\s*std::chrono::steady_clock\b", text) and path != "include/shoal/detail/clock.h":
        yield "%s: another name for the clock of include/shoal/detail/clock.h" % path
    if re.search(r"\bMPI_[A-Z]|<mpi\.h>", text) and not path.startswith("src/comm/mpi/"):
        yield "%s: MPI outside src/comm/mpi/" % path
    if re.search(r"ProcessGroupGloo|<gloo/|\"gloo/", text) and path != "src/comm/transport/gloo.cpp":
        yield "%s: Gloo outside src/comm/transport/gloo.cpp" % path


# What a user is told to include.
DETAIL = re.compile(r"\bdetail/\w+\.h\b")


def check_errors(path, text):
    """Errors that name a header of detail/, which is not for users."""
    if any(DETAIL.search(line) and '"' in line for line in text.splitlines() if not INCLUDE.match(line)):
        yield "%s: an error names a header of detail/" % path


def check_pages(root):
    """Pages that do."""
    for folder, _, names in os.walk(os.path.join(root, "docs")):
        for name in names:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
                if name.endswith(".md") and DETAIL.search(f.read()):
                    yield "%s: names a header of detail/" % os.path.relpath(os.path.join(folder, name), root)


# Classes have one job each. Those of the exceptions have more members, and may only lose some.
MOST_MEMBERS = 20
LARGE = {
    "DecentralizedDataParallelCore::State": 38,
    "Job": 22,
    "JobStore::State": 36,
    "TrainOptions": 45,
    "TrainResult": 26,
}
CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+((?:\w+::)*\w+)(?:\s+final)?\s*(?::[^;{}()]*)?\{")
NO_MEMBER = re.compile(r"\b(using|friend|typedef|static|template|class|struct|enum|union|static_assert|operator)\b")


def without_templates(text):
    shorter = re.sub(r"<[^<>]*>", "", text)
    return text if shorter == text else without_templates(shorter)


def statements(body):
    """The declarations of a class, given its text from behind the opening brace; what is in inner brackets left out."""
    found, text, depth = [], "", 0
    for c in body:
        if c == "}" and depth == 0:
            return found
        depth += (c in "({[") - (c in ")}]")
        if depth == 0 or depth == 1 and c in "({":
            text += c
        if depth > 0 or c not in ";}:":
            continue
        plain = without_templates(text)
        is_function = "(" in plain.split("=")[0]
        if c == ";" or c == "}" and is_function:
            found.append(plain)
            text = ""
        elif re.search(r"\b(public|protected|private)\s*:$", text):
            text = ""
    return found


def members(body):
    """The number of data members that the declarations declare."""
    count = 0
    for plain in statements(body):
        declared = plain.split("=")[0]
        if "(" in declared or NO_MEMBER.search(declared) or not re.search(r"[\w&*]\s+\w", declared):
            continue
        count += 1 + declared.count(",")
    return count


def check_sizes(path, text):
    """Violations of the number of data members that a class may have; nested classes count on their own."""
    if not path.startswith("src/"):
        return
    for match in CLASS.finditer(text):
        name, count = match.group(1), members(text[match.end():])
        most = LARGE.get(name, MOST_MEMBERS)
        if count > most:
            yield "%s: %s has %d data members, more than %d" % (path, name, count, most)
        if name in LARGE and count < most:
            yield "%s: %s has %d data members: LARGE in check.py can have fewer, or need not name it" % (path, name, count)


STRING = re.compile(r'R"\((?:.|\n)*?\)"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'')
SCOPE = re.compile(r"\bnamespace\s+([\w:]*)\s*\{|" + CLASS.pattern.replace("(?<!enum )", "") + r"|[{}]")


def defined_classes(text):
    """Full names of the classes at namespace scope; none of unnamed namespaces and functions."""
    scopes = []  # the names of what is open; None: nothing in it can be named elsewhere
    for match in SCOPE.finditer(STRING.sub('""', COMMENT.sub("", text))):
        namespace, name = match.groups()
        if match.group() == "}":
            scopes = scopes[:-1]
            continue
        if name and None not in scopes:
            yield "::".join(scopes + [name])
        scopes.append(name or namespace or None)


def check_one_definition(classes):
    """Classes of one name in two files. The linker keeps one of their destructors for both, without a word."""
    places = {}
    for path, names in sorted(classes.items()):
        for name in names:
            places.setdefault(name, set()).add(path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1:
            yield "%s is defined in %s" % (name, " and in ".join(sorted(paths)))


# Ids of docs/requirements.md move; CLI11 is a library.
REQUIREMENT = re.compile(r"\b(?!CLI11\b)[A-Z]{3}[0-9]{2}\b")


# A file's comment opens with a noun.
OPENING = re.compile(r"\s*(?:#pragma once\s*)?// (What|How|Which|Who|Whose|Whether|When|Where|Of)\b")


def check_comments(path, text):
    """Violations of what comments may say."""
    if OPENING.match(text):
        yield "%s: its first comment opens with '%s', not with a noun" % (path, OPENING.match(text).group(1))
    for comment in COMMENT.findall(text):
        if REQUIREMENT.search(comment):
            yield "%s: a comment names %s of docs/requirements.md" % (path, REQUIREMENT.search(comment).group())


@functools.cache  # check_test.py plants a violation in one file after the other
def examine(path, text):
    """Violations within a file, what it includes, and the classes that it defines."""
    code = COMMENT.sub("", text)
    found = [*check_comments(path, text), *check_names(path, code), *check_sizes(path, code), *check_errors(path, text)]
    return found, INCLUDE.findall(code), list(defined_classes(text))


def violations(root):
    files = sources(root)
    graph, classes, found = {}, {}, []
    for path, text in sorted(files.items()):
        within, includes, classes[path] = examine(path, text)
        graph[path] = [t for t in (resolve(i, files) for i in includes) if t]
        found += within
        found += [line for line in (check_layers(path, target) for target in graph[path]) if line]
    found += file_names.check_file_names(files)
    found += check_one_definition(classes)
    found += check_pages(root)
    return found + check_cycles(graph) + list(check_folders(graph))


def main():
    found = violations(sys.argv[1]) + list(lengths.violations(sys.argv[1]))
    print("\n".join(found) or "%d files in order" % len(sources(sys.argv[1])))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
