"""The port in packaging/vcpkg, without vcpkg (vcpkg_port.cmake stands for it): a package of the build tree, and a program that is
built with it and runs on two ranks.

    python vcpkg_test.py REPOSITORY BUILD WORK

The port configures shoal anew; what it installs comes from BUILD, as to compile it again takes as long as `make`.
"""

import json
import os
import re
import sys

from recipes import libtorch_of, run

# What vcpkg knows at the top of a port's vcpkg.json and in a dependency that is not a plain name.
KEYS = {"name", "version", "port-version", "description", "homepage", "license", "supports", "dependencies", "features",
        "default-features"}
DEPENDENCY_KEYS = {"name", "host", "platform", "features", "default-features", "version>="}


def check_dependencies(dependencies):
    for each in dependencies:
        assert isinstance(each, str) or (set(each) <= DEPENDENCY_KEYS and "name" in each), each
    names = [each if isinstance(each, str) else each["name"] for each in dependencies]
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names), names
    assert names == sorted(set(names)), names


def check_manifest(root):
    with open(os.path.join(root, "packaging/vcpkg/shoal/vcpkg.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    with open(os.path.join(root, "CMakeLists.txt"), encoding="utf-8") as file:
        version = re.search(r"project\(shoal VERSION ([0-9.]+)", file.read())[1]
    assert set(manifest) <= KEYS, manifest
    assert manifest["name"] == "shoal" and manifest["version"] == version, manifest
    check_dependencies(manifest["dependencies"])
    for feature in manifest["features"].values():
        assert set(feature) <= {"description", "dependencies", "supports"} and feature["description"], feature
        check_dependencies(feature["dependencies"])


def main():
    root, build, work = (os.path.abspath(path) for path in sys.argv[1:])
    check_manifest(root)
    os.makedirs(work, exist_ok=True)
    port = ["cmake", "-DPORT=" + os.path.join(root, "packaging/vcpkg/shoal"), "-DWORK=" + work, "-DBUILT=" + build,
            "-P", os.path.join(root, "tests/package/vcpkg_port.cmake")]
    without = {key: value for key, value in os.environ.items() if key != "SHOAL_TORCH"}
    said = run(*port, code=1, env=without)
    assert "set the environment variable SHOAL_TORCH to libtorch's folder" in said, said
    run(*port, env={**without, "SHOAL_TORCH": libtorch_of(build)})

    packages = os.path.join(work, "packages")
    top = sorted(os.listdir(packages))
    assert top == ["include", "lib", "share", "tools"], top
    libraries = sorted(os.listdir(os.path.join(packages, "lib")))
    assert libraries and all(name.startswith("libshoal.so") for name in libraries), libraries
    assert {"copyright", "shoalConfig.cmake", "shoalTargets.cmake"} <= set(os.listdir(os.path.join(packages, "share/shoal")))

    program = os.path.join(work, "program")
    run("cmake", "-G", "Ninja", "-S", os.path.join(root, "packaging/conan/test_package"), "-B", program,
        "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_PREFIX_PATH=" + packages)
    run("cmake", "--build", program)
    said = run(os.path.join(packages, "tools/shoal/shoal"), "launch", "-n", 2, "--", os.path.join(program, "example"))
    assert "sum over the ranks: 2" in said, said
    print("packed by the port; a program was built with the package and ran on two ranks")


if __name__ == "__main__":
    main()
