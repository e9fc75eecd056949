"""Runs a program's ranks on several hosts: network namespaces with process namespaces of their own, joined by slow links.

    python hosts.py --hosts 2 --rate 100mbit --ranks 2 -- build/span_test

Every host gets --ranks ranks. Needs root; ends with code 77 (skipped) where namespaces are not allowed.
"""

import argparse
import os
import subprocess
import sys

SKIPPED = 77


def run(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


class Hosts:
    """Namespaces and a switch between them; gone when the block ends. Each host sends at `rate` at most."""

    def __init__(self, count, rate):
        self.rate = rate
        self.names = [f"shoal{os.getpid()}h{host}" for host in range(count)]
        self.switch = f"shoal{os.getpid()}s"
        self.links = [f"sh{os.getpid() % 100000}h{host}" for host in range(count)]

    def __enter__(self):
        try:
            for name in [self.switch, *self.names]:
                run("ip", "netns", "add", name)
            at_switch = ("ip", "netns", "exec", self.switch)
            run(*at_switch, "ip", "link", "add", "switch", "type", "bridge")
            run(*at_switch, "ip", "link", "set", "switch", "up")
            for number, (name, link) in enumerate(zip(self.names, self.links)):
                port = f"port{number}"
                run("ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
                run(*at_switch, "ip", "link", "set", port, "master", "switch")
                run(*at_switch, "ip", "link", "set", port, "up")
                inside = ("ip", "netns", "exec", name)
                run(*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", link)
                run(*inside, "ip", "link", "set", link, "up")
                run(*inside, "ip", "link", "set", "lo", "up")
                # Behaves like cubic, which most systems have, and is allowed on all. BBR, which some have, takes a third
                # longer for short bursts to neighbours that change.
                run(*inside, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
                run(*inside, "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", self.rate, "burst", "256kb",
                    "latency", "50ms")
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.__exit__()
            detail = getattr(error, "stderr", b"") or str(error).encode()
            print("skipped: cannot make network namespaces:", detail.decode().strip())
            sys.exit(SKIPPED)
        return self

    def __exit__(self, *_):
        for name in [self.switch, *self.names]:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def cut(self, host):
        """Nothing comes from or to the host any more; nobody is told."""
        run("ip", "netns", "exec", self.switch, "ip", "link", "set", f"port{host}", "down")

    def mend(self, host):
        """After cut(): what was on its way comes yet."""
        run("ip", "netns", "exec", self.switch, "ip", "link", "set", f"port{host}", "up")

    def start(self, host, ranks, command, **streams):
        """The ranks of one host, under a shell that is its first process and ends when all of them have."""
        lines = ["status=0"]
        lines += [f"RANK={host * ranks + local} {' '.join(command)} & pid{local}=$!" for local in range(ranks)]
        lines += [f"wait $pid{local} || status=1" for local in range(ranks)]
        lines += ["exit $status"]
        environment = dict(os.environ, WORLD_SIZE=str(len(self.names) * ranks), MASTER_ADDR="10.77.0.1", MASTER_PORT="29611",
                           OMP_NUM_THREADS="1", SHOAL_LINK=self.links[host])
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], "unshare", "--pid", "--fork", "--kill-child",
                                 "--mount-proc", "sh", "-c", "\n".join(lines)], env=environment, **streams)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = [part for part in options.command if part != "--"]
    with Hosts(options.hosts, options.rate) as hosts:
        processes = [hosts.start(host, options.ranks, command) for host in range(options.hosts)]
        codes = [process.wait() for process in processes]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
