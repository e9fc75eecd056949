"""Makes the Debian package of a build, installs it in a bare root of a distribution, and builds and runs README's program there.
By hand, as root.

    python3 tests/package/bare_deb.py bookworm
    python3 tests/package/bare_deb.py trixie --root /tmp/trixie     # keeps the root, for the next call

The build's libtorch is the root's: first in the folder where the package looks for it, so that nothing has to be said, then in
another one, which LD_LIBRARY_PATH and CMAKE_PREFIX_PATH name. --build is the folder of the build, --bind as for bare_root.py."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

import bare_root
import docs
import recipes

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ELSEWHERE = "/opt/another/libtorch"

INSTALL = """set -eu
cd /shoal
export DEBIAN_FRONTEND=noninteractive
dpkg --purge shoal >/dev/null 2>&1  # of an earlier call
apt-get update -qq
apt-get install -y -qq --no-install-recommends ./shoal.deb g++ cmake make >/dev/null
dpkg-query -W -f '${Package} ${Version}: ${db:Status-Status}, depends on ${Depends}\\n' shoal
"""
USE = """rm -rf program/build
cmake -S program -B program/build >log 2>&1 || { cat log; exit 1; }
cmake --build program/build >log 2>&1 || { cat log; exit 1; }
tail -n 1 log
shoal --version
shoal launch -n 2 -- program/build/example
"""
WITHOUT = """if shoal --version; then
  echo 'failed: the program has found a libtorch where none is'
  exit 1
fi
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--root", help="folder of a root that debootstrap has made, or is to make")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    return parser.parse_args()


def make_package(build, folder):
    """The package, and the folder in which what it installs looks for libtorch."""
    recipes.run("cpack", "-G", "DEB", "-B", folder, cwd=build)
    package = next(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".deb"))
    recipes.run("dpkg-deb", "-x", package, os.path.join(folder, "content"))
    said = recipes.run("readelf", "-d", os.path.join(folder, "content", "usr", "bin", "shoal"))
    paths = next(line for line in said.splitlines() if "RUNPATH" in line).split("[")[1].split("]")[0]
    print("package: %s, %.1f MB; RUNPATH %s" % (os.path.basename(package), os.path.getsize(package) / 1e6, paths), flush=True)
    torch = recipes.libtorch_of(build)
    assert os.path.join(torch, "lib") in paths.split(":"), (torch, paths)
    return package, torch


def copy_program(package, target):
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(os.path.join(target, "program"))
    shutil.copy(package, os.path.join(target, "shoal.deb"))
    for language, name in (("cpp", "example.cpp"), ("cmake", "CMakeLists.txt")):
        with open(os.path.join(target, "program", name), "w", encoding="utf-8") as file:
            file.write(docs.blocks(ROOT, "README.md", language)[0].code)


def check(code, what):
    if code:
        sys.exit("failed: %s: exit code %d" % (what, code))


def main():
    options = parse()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("bare_deb: needs root and debootstrap")
        return recipes.SKIPPED
    shared = [(path, path) for path in options.bind]
    with tempfile.TemporaryDirectory(prefix="shoal-deb-") as folder:
        root = os.path.abspath(options.root or os.path.join(folder, "root"))
        package, torch = make_package(os.path.abspath(options.build), folder)
        bare_root.debootstrap(options, root)
        target = os.path.join(root, "shoal")
        copy_program(package, target)
        torch_here = os.path.realpath(torch)
        check(bare_root.run(root, [*shared, (torch_here, torch)], INSTALL + USE), "with libtorch where it was in the build")
        # What was mounted is gone.
        check(bare_root.run(root, shared, "cd /shoal\n" + WITHOUT), "without libtorch")
        variables = "export LD_LIBRARY_PATH=%s/lib CMAKE_PREFIX_PATH=%s\n" % (ELSEWHERE, ELSEWHERE)
        check(bare_root.run(root, [*shared, (torch_here, ELSEWHERE)], "set -eu\ncd /shoal\n" + variables + USE),
              "with libtorch elsewhere")
        shutil.rmtree(target)
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
