"""Runs the shell commands that README and docs show.

    python commands_test.py REPOSITORY SHOAL [--page docs/launching.md] [--list]

Every block of language sh runs, in the order of its page and in a folder of the page's own that looks like the
repository after a build, with a training in place of the programs that blocks call ./train and ./program. A block whose
first line says why not, ```sh no-run: it needs two hosts, does not run. In either case the program must know each option
that the block gives it. torchrun is that of .venv, if there is none in PATH.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import docs

SECONDS = 240  # for one block
SHARED = ("README.md", "SECURITY.md", "bench", "scripts", "tests", "docs")
# Programs of a user's own, which a launcher starts.
STAND_INS = ("train", "program")
STAND_IN = "#!/bin/sh\nexec shoal train --model mlp --data reference --steps 2\n"


def reason(block):
    """Why it does not run; None: it does."""
    if block.note.startswith("no-run:"):
        return block.note.removeprefix("no-run:").strip()
    needs = [name for name in ("mpirun", "torchrun") if re.search(r"\b%s " % name, block.code)]
    return next(("there is no %s here" % name for name in needs if not shutil.which(name)), None)


def make_folder(folder, root, shoal):
    for name in SHARED:
        os.symlink(os.path.join(root, name), os.path.join(folder, name))
    os.symlink(os.path.dirname(shoal), os.path.join(folder, "build"))
    for name in STAND_INS:
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(STAND_IN)
        os.chmod(path, 0o755)


def run(block, folder, shoal):
    """What went wrong, or None."""
    environment = dict(os.environ, PATH=os.path.dirname(shoal) + os.pathsep + os.environ["PATH"], OMP_NUM_THREADS="1")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"):
        environment[name] = "1"
    try:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], cwd=folder, env=environment, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "no end after %d s" % SECONDS
    return None if done.returncode == 0 else "exit code %d\n%s%s" % (done.returncode, done.stdout, done.stderr)


@functools.lru_cache(maxsize=None)
def help_of(shoal, words):
    """None: there is no such command."""
    done = subprocess.run([shoal, *words, "--help"], capture_output=True, text=True, check=False)
    if not words or done.returncode:
        return done.stdout if done.returncode == 0 else None
    known = re.search(r"^  %s\s" % re.escape(words[-1]), help_of(shoal, words[:-1]), re.M)
    return done.stdout if known else None


def commands(code):
    """(words of the command, options) of each call of the program."""
    for line in re.sub(r"\\\n\s*", " ", code).split("\n"):
        for call in re.split(r"[|;&]", line.split(" #")[0]):
            found = re.search(r"(?:^|[ /])shoal\s+([a-z][a-z-]*)(.*)$", call)
            if not found or "python -m shoal" in call:  # the Python package has commands of its own
                continue
            rest = found[2].split(" -- ")[0]
            words = [found[1]]
            follows = re.match(r"\s+([a-z]+)\b", rest)
            if found[1] in ("checkpoint", "trace") and follows:
                words.append(follows[1])
            yield tuple(words), re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest)


def unknown_options(block, shoal):
    for words, options in commands(block.code):
        text = help_of(shoal, words)
        if text is None:
            yield "there is no `shoal %s`" % " ".join(words)
            continue
        for option in options:
            if not re.search(re.escape(option) + r"\b(?!-)", text):
                yield "`shoal %s` has no %s" % (" ".join(words), option)


def faults_are_found(shoal):
    code = "x=1 build/shoal train --ranks 2 \\\n --no-such\nshoal nothing | shoal trace merge --steps 2; python -m shoal own"
    block = docs.Block("", 0, "sh", "", 1, code)
    found = list(unknown_options(block, shoal))
    assert found == ["`shoal train` has no --no-such", "there is no `shoal nothing`",
                     "`shoal trace merge` has no --steps"], found
    with tempfile.TemporaryDirectory() as folder:
        assert "exit code 3" in run(block._replace(code="true | (exit 3)\ntrue"), folder, shoal)
    assert reason(block._replace(note="no-run: two hosts")) == "two hosts" and reason(block) is None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("shoal", help="the program, in the folder of its build")
    parser.add_argument("--page", action="append", help="only this page")
    parser.add_argument("--list", action="store_true", help="say what runs, without running it")
    arguments = parser.parse_args()
    root, shoal = os.path.abspath(arguments.root), os.path.abspath(arguments.shoal)
    os.environ["PATH"] += os.pathsep + os.path.join(root, ".venv", "bin")
    faults_are_found(shoal)
    faults, ran, rested = [], 0, 0
    for page in arguments.page or docs.pages(root):
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, root, shoal)
            for block in docs.blocks(root, page, "sh"):
                place = "%s:%d" % (page, block.line)
                faults += ["%s: %s" % (place, fault) for fault in unknown_options(block, shoal)]
                why = reason(block)
                if why is not None or arguments.list:
                    rested += 1
                    faults += ["%s: no-run without a reason" % place] if why == "" else []
                    print("%s: %s" % (place, "not run: " + why if why else "runs"), flush=True)
                    continue
                begin = time.monotonic()
                fault = run(block, folder, shoal)
                ran += 1
                print("%s: %s, %.1f s" % (place, "failed" if fault else "ran", time.monotonic() - begin), flush=True)
                faults += ["%s: %s\n%s" % (place, fault, block.code)] if fault else []
    print("\n".join(faults) or "%d blocks ran, %d did not" % (ran, rested))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
