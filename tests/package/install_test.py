"""Builds README's program as README says, against an installed shoal, and runs it on two ranks.

    python install_test.py REPOSITORY BUILD WORK

Also configures the way of docs/getting_started.md, in which the program's project contains shoal.
"""

import os
import re
import shutil
import subprocess
import sys

import docs

# As on a machine where none of what the library is built with besides libtorch can be found.
CMAKE = """cmake() {
  if [ "$1" = -S ]; then
    set -- -G Ninja -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON \
      -DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON "$@"
  fi
  command cmake "$@"
}
make() { :; }
"""


def run(script, folder, home):
    environment = dict(os.environ, HOME=home)
    environment.pop("CMAKE_PREFIX_PATH", None)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, "%s\nexit code %d\n%s\n%s" % (script, done.returncode, done.stdout, done.stderr)
    return done.stdout


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main():
    root, build, work = (os.path.abspath(path) for path in sys.argv[1:])
    shutil.rmtree(work, ignore_errors=True)
    program = next(block.code for block in docs.blocks(root, "README.md", "cpp") if "int main" in block.code)
    (package,) = (block.code for block in docs.blocks(root, "README.md", "cmake"))
    (content,) = (block.code for block in docs.blocks(root, "docs/getting_started.md", "cmake"))
    commands = next(block.code for block in docs.blocks(root, "README.md", "sh") if "cmake --install" in block.code)

    write(os.path.join(work, "program", "example.cpp"), program)
    write(os.path.join(work, "program", "CMakeLists.txt"), package)
    os.symlink(build, os.path.join(work, "build"))
    said = run(CMAKE + commands, work, work)
    assert re.search(r"\[0\] loss [0-9.]+ on 2 ranks", said), "the example printed: " + said
    print(said.strip().splitlines()[-1])

    # The same project, which contains shoal: CMake knows how to build it. A build would take as long as that of shoal.
    head = package.split("find_package")[0]
    write(os.path.join(work, "inside", "example.cpp"), program)
    write(os.path.join(work, "inside", "CMakeLists.txt"), head + content)
    os.symlink(root, os.path.join(work, "shoal-source"))
    run("cmake -G Ninja -S inside -B inside/build && ninja -C inside/build -n example > plan && grep -q libshoal plan",
        work, work)
    print("a project that contains shoal configures")


if __name__ == "__main__":
    main()
