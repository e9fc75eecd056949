"""Checks the structure of the sources: layers, cycles, and what may be named only in one place.

    python check.py REPOSITORY    prints one line per violation; exit code 1 if there is any
"""

import os
import re
import sys

# May include only what stands before it in its line. Lines are alternatives to each other where layers are unrelated.
ORDER = ["base", "layout", "memory", "comm", "module", "checkpoint", "optim", "engine", "strategy"]
ALLOWED = {layer: set(ORDER[:i + 1]) for i, layer in enumerate(ORDER)}
ALLOWED["launch"] = {"base", "comm", "launch"}
ALLOWED["models"] = {"base", "models"}
ALLOWED["data"] = {"base", "models", "data"}
ALLOWED["cli"] = set(ORDER) | {"launch", "models", "data", "cli"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/', re.S)


def sources(root):
    """{path relative to the repository: text without comments} of all headers and sources."""
    result = {}
    for top in ("include/shoal", "src"):
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                if name.endswith((".h", ".cpp")):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as f:
                        result[os.path.relpath(path, root)] = COMMENT.sub("", f.read())
    return result


def layer_of(path):
    """'comm' of src/comm/x.cpp and include/shoal/comm/x.h; None of files above all layers."""
    parts = path.split("/")
    inside = parts[2:] if parts[0] == "include" else parts[1:]
    return inside[0] if len(inside) > 1 else None


def resolve(include, files):
    """The project's file that an include means, or None."""
    for candidate in ("include/" + include, "src/" + include):
        if candidate in files:
            return candidate
    return None


def cycles(graph):
    """One line per include cycle."""
    found, done, path = [], set(), []

    def visit(node):
        if node in path:
            found.append("include cycle: " + " -> ".join(path[path.index(node):] + [node]))
            return
        if node in done:
            return
        path.append(node)
        for target in graph[node]:
            visit(target)
        path.pop()
        done.add(node)

    for node in sorted(graph):
        visit(node)
    return found


# Strategies that are made of others, and of which.
COMPOSED = {"shard_gossip": ("decentralized", "fsdp")}


def strategy_of(path):
    """src/strategy/ddp.cpp and include/shoal/strategy/ddp.h: "ddp"; .../strategy/zero/oss.h: "zero"."""
    return os.path.splitext(path.split("strategy/", 1)[1].split("/")[0])[0]


def check_layers(path, target):
    """A violation of the order of layers, or None."""
    source, used = layer_of(path), layer_of(target)
    if path.startswith("include/") and target.startswith("src/"):
        return "%s: a public header includes %s of src/" % (path, target)
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
    if re.search(r"\bMPI_[A-Z]|<mpi\.h>", text) and not path.startswith("src/comm/mpi"):
        yield "%s: MPI outside src/comm/mpi*" % path
    if re.search(r"ProcessGroupGloo|<gloo/|\"gloo/", text) and path != "src/comm/gloo.cpp":
        yield "%s: Gloo outside src/comm/gloo.cpp" % path


def violations(root):
    files = sources(root)
    graph, found = {}, []
    for path, text in sorted(files.items()):
        targets = [t for t in (resolve(i, files) for i in INCLUDE.findall(text)) if t]
        graph[path] = targets
        found += [line for line in (check_layers(path, target) for target in targets) if line]
        found += check_names(path, text)
    return found + cycles(graph)


def main():
    found = violations(sys.argv[1])
    print("\n".join(found) or "%d files in order" % len(sources(sys.argv[1])))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
