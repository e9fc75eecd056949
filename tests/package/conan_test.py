"""The recipe in packaging/conan: a package of the build tree, and a program that is built with it and runs on two ranks.

    python conan_test.py REPOSITORY BUILD WORK [CONAN]

The recipe configures shoal anew, against packages that lie in folders of Conan's. What it packs comes from BUILD, as to
compile it again takes as long as `make`. ConanCenter is not needed. Ends with code 77 (skipped) without conan.
"""

import glob
import os
import shutil
import sys

from recipes import SKIPPED, copy_of, libtorch_of, run

INVALID = 6  # conan's exit code for a configuration that the recipe refuses
PACKAGES = ("cli11/2.4.2", "fmt/10.2.1", "nlohmann_json/3.11.3")
PROFILE = """
include(default)
[platform_requires]
openssl/3.0.0
zlib/1.2.13
[conf]
tools.cmake.cmaketoolchain:generator=Ninja
"""


def main():
    root, build, work = (os.path.abspath(path) for path in sys.argv[1:4])
    program = next((path for path in ("conan", *sys.argv[4:]) if shutil.which(path)), None)
    if program is None:
        print("skipped: no conan; scripts/setup --tests installs it where it is to be had")
        sys.exit(SKIPPED)
    source = copy_of(root, os.path.join(work, "shoal"))
    home = os.path.join(work, "home")
    shutil.rmtree(home, ignore_errors=True)
    environment = dict(os.environ, CONAN_HOME=home)
    profile = os.path.join(work, "profile")
    with open(profile, "w", encoding="utf-8") as file:
        file.write(PROFILE)

    def conan(*arguments, code=0):
        return run(program, *arguments, code=code, cwd=source, env=environment)

    conan("profile", "detect")
    for package in PACKAGES:
        name, version = package.split("/")
        conan("create", os.path.join(root, "tests/package/conan_headers"), "--name", name, "--version", version, "-nr")
    options = ("packaging/conan", "-pr", profile, "-nr", "-o", "&:torch=" + libtorch_of(build))

    # What is wrong is one sentence.
    said = conan("install", *options, "-o", "&:torch=/nowhere", code=INVALID)
    assert "option torch is '/nowhere': give libtorch's folder" in said, said
    said = conan("install", *options, "-s", "compiler.libcxx=libstdc++", code=INVALID)
    assert "libtorch has the C++11 ABI: set compiler.libcxx=libstdc++11" in said, said

    # It configures, and every file is compiled with the packages' headers.
    conan("install", *options)
    run("cmake", "--preset", "conan-release", cwd=source)
    tree = os.path.join(source, "build-conan", "Release")
    commands = run("ninja", "-C", tree, "-t", "commands", "libshoal", "shoal_cli").splitlines()
    commands = [line for line in commands if " -c " in line]
    assert len(commands) > 20, commands
    for name in ("fmt", "nlohm"):
        without = [line for line in commands if "-isystem %s/p/b/%s" % (home, name) not in line]
        assert not without, "compiled without %s:\n%s" % (name, without[0])
    assert not any("mpi.h" in line or "openmpi" in line for line in commands), "MPI without the option mpi"

    # `conan create` builds here. The package is made, and the program in test_package built and run, as there.
    shutil.copy(os.path.join(build, "cmake_install.cmake"), tree)
    said = conan("export-pkg", *options)
    assert "sum over the ranks: 2" in said, said
    assert glob.glob(os.path.join(home, "p", "**", "licenses", "LICENSE"), recursive=True)
    print("packed by conan; a program was built with the package and ran on two ranks")


if __name__ == "__main__":
    main()
