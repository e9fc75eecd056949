"""Runs a command of this repository in a bare root of a distribution, and says how long it took. By hand, as root.

    python3 tests/package/bare_root.py bookworm make demo
    python3 tests/package/bare_root.py trixie make demo --user         # with sudo, and not as root
    python3 tests/package/bare_root.py noble make demo --mirror http://archive.ubuntu.com/ubuntu --torch /path/to/torch

debootstrap makes the root; the files that git tracks are copied into /shoal, and the command runs there. --bind shares a folder or
file of this machine, for example one that pip is set to look in; --torch shares a libtorch, which SHOAL_TORCH then names. --root
keeps the root that debootstrap makes, for the next call."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("command", nargs="+", help="for example: make demo")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--root", help="folder of a root that debootstrap has made, or is to make")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    parser.add_argument("--torch", help="folder of a libtorch of this machine")
    parser.add_argument("--user", action="store_true", help="as a user who may use sudo")
    parser.add_argument("--keep", action="store_true", help="leave /shoal in the root")
    return parser.parse_args()


def debootstrap(options, root):
    if os.path.exists(os.path.join(root, "etc", "os-release")):
        return
    begin = time.monotonic()
    command = ["debootstrap", "--variant=minbase", options.suite, root, options.mirror]
    if "ubuntu" in options.mirror:
        # Its keys, and a script for suites that are newer than this debootstrap, are not everywhere.
        command[1:1] = ["--no-check-gpg", "--components=main,universe"]
        command.append("gutsy")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print("debootstrap: %.1f min" % ((time.monotonic() - begin) / 60), flush=True)


def copy_repository(root):
    here = subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip()
    target = os.path.join(root, "shoal")
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    listed = subprocess.Popen(["git", "-C", here, "ls-files", "-z"], stdout=subprocess.PIPE)
    packed = subprocess.Popen(["tar", "-C", here, "--null", "-T", "-", "-c"], stdin=listed.stdout, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", target, "-x"], stdin=packed.stdout, check=True)
    return target


def script(options):
    lines = ["set -eu", "cd /shoal"]
    if options.torch:
        lines.append("export SHOAL_TORCH=/libtorch")
    begin = "begin=$(date +%s)"
    packages = "make" + (" sudo" if options.user else "")
    lines += ["apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends %s >/dev/null"
              % packages, begin]
    command = " ".join(options.command)
    if options.user:
        lines += ["id shoal >/dev/null 2>&1 || useradd -m shoal", "chown -R shoal /shoal",
                  "echo 'shoal ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/shoal",
                  "su shoal -c 'cd /shoal && %s%s'" % ("SHOAL_TORCH=/libtorch " if options.torch else "", command)]
    else:
        lines.append(command)
    lines.append("echo \"%s: $(( ($(date +%%s) - begin) / 60 )) min $(( ($(date +%%s) - begin) %% 60 )) s\"" % command)
    return "\n".join(lines)


def run(root, shared, text):
    """Runs a script of the shell in the root, with (path here, path there) shared; its exit code."""
    inside = ["mount --make-rprivate /", "mount -t proc proc %s/proc" % root, "mount --rbind /dev %s/dev" % root]
    for source, place in [*shared, ("/etc/resolv.conf", "/etc/resolv.conf")]:
        if not os.path.exists(source):
            continue
        target = root + place
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "a").close()
        inside.append("mount --bind %s %s" % (source, target))
    inside.append('exec chroot %s /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 %s sh -c "$0"'
                  % (root, " ".join("%s=%s" % (name, os.environ[name]) for name in os.environ if name.startswith("PIP_"))))
    # A namespace of its own takes the mounts along when it ends, and processes that are left.
    return subprocess.call(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(inside), text])


def main():
    options = parse()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("bare_root: needs root and debootstrap")
        return 77
    root = os.path.abspath(options.root or tempfile.mkdtemp(prefix="shoal-root-"))
    try:
        debootstrap(options, root)
        target = copy_repository(root)
        shared = [(path, path) for path in options.bind]
        if options.torch:
            shared.append((os.path.realpath(options.torch), "/libtorch"))
        result = run(root, shared, script(options))
        if not options.keep:
            shutil.rmtree(target, ignore_errors=True)
        return result
    finally:
        if not options.root:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
