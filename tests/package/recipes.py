"""What the tests of the recipes in packaging/ share."""

import os
import re
import shutil
import subprocess
import sys

SKIPPED = 77


def run(*command, code=0, **options):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, **options)
    if done.returncode != code:
        sys.exit("failed: %s\nexit code %d\n%s" % (" ".join(map(str, command)), done.returncode, done.stdout))
    return done.stdout


def libtorch_of(build):
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as file:
        folder = re.search(r"^Torch_DIR:\w+=(.*)$", file.read(), re.M)[1]
    return os.path.normpath(os.path.join(folder, "..", "..", ".."))


def copy_of(root, folder):
    """The files that the recipes take, in a folder that they may write to."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("cmake", "include", "src", "packaging"):
        shutil.copytree(os.path.join(root, name), os.path.join(folder, name))
    for name in ("CMakeLists.txt", "LICENSE"):
        shutil.copy(os.path.join(root, name), folder)
    return folder
