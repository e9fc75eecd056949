"""examples/cluster/mpirun.sh and torchrun.sh over two hosts: network namespaces, with a stand-in for ssh. And the name of a
host that has several addresses, of which the other host reaches only the last.

    python two_hosts_test.py SHOAL EXAMPLES mpirun|torchrun|addresses [TORCHRUN]

Needs root; ends with code 77 (skipped) where namespaces or the launcher are missing.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from hosts import SKIPPED, Hosts  # noqa: E402

TRAINING = ("train", "--data", "reference", "--model", "mlp", "--steps", "3")
# Open MPI starts its daemon on another host by: AGENT ADDRESS COMMAND...
AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "no such host: $1" >&2; exit 255
esac
shift
exec ip netns exec "$name" unshare --pid --fork --kill-child --mount-proc sh -c "$*"
"""


NAME = "store.shoal"
REACHED = "10.77.0.1"
# The other host's resolver gives it first, as it has more bits of that host's own address than the one that is reached.
NOT_REACHED = "10.77.0.3"
FIRST_ADDRESS = "import socket; print(socket.getaddrinfo('%s', 1, type=socket.SOCK_STREAM)[0][4][0])" % NAME


def start(hosts, host, command, environment):
    return subprocess.Popen(["ip", "netns", "exec", hosts.names[host], "unshare", "--pid", "--fork", "--kill-child",
                             "--mount-proc", *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def finish(processes):
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        sys.exit("failed: not over within 150 s\n" + "\n".join(process.communicate()[0] for process in processes))
    print("\n".join(outputs))
    if any(process.returncode != 0 for process in processes):
        sys.exit("failed: " + ", ".join(str(process.returncode) for process in processes))
    return outputs


def require_training(outputs):
    if not any("on 4 rank(s), ddp, host+tcp" in output for output in outputs):
        sys.exit("failed: no training on four ranks of two hosts")


def over_several_addresses(shoal):
    """As interfaces of rank 0's host that no other host reaches, and as addresses of a host that is gone."""
    training = f"{shoal} {' '.join(TRAINING)}"
    by_hand = f"RANK=$((2 * $HOST)) {training} & RANK=$((2 * $HOST + 1)) {training} && wait $!"
    launched = f"exec {shoal} launch --nnodes 2 --node-rank $HOST -n 2 --address {NAME} --port 29511 -- {training}"
    environment = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE="4", MASTER_ADDR=NAME, MASTER_PORT="29510")
    with Hosts(2, "1gbit") as hosts, tempfile.NamedTemporaryFile("w") as names:
        inside = ("ip", "netns", "exec", hosts.names[0])
        subprocess.run([*inside, "sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1"], check=True)
        names.write(f"127.0.0.1 localhost\n{NOT_REACHED} {NAME}\n{REACHED} {NAME}\n")
        names.flush()
        for own in (True, False):
            if own:
                subprocess.run([*inside, "ip", "addr", "add", f"{NOT_REACHED}/32", "dev", "lo"], check=True)
            else:
                subprocess.run([*inside, "ip", "addr", "del", f"{NOT_REACHED}/32", "dev", "lo"], check=True)
            for script in (by_hand, launched):
                # `ip netns exec` has made a mount namespace.
                lines = f'mount --bind {names.name} /etc/hosts\n{sys.executable} -c "{FIRST_ADDRESS}"\n{script}'
                outputs = finish([start(hosts, host, ["env", f"HOST={host}", "bash", "-c", lines], environment)
                                  for host in range(2)])
                first = [output.splitlines()[0] for output in outputs]
                if first[1] != NOT_REACHED or (own and first[0] != NOT_REACHED):
                    sys.exit(f"failed: the resolver gives another address first: {first}")
                require_training(outputs)


def main():
    shoal, examples = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    launcher = sys.argv[3]
    if launcher == "addresses":
        over_several_addresses(shoal)
        return
    program = sys.argv[4] if len(sys.argv) > 4 else shutil.which(launcher)
    if program is None or not pathlib.Path(program).exists():
        print(f"skipped: {launcher} is not installed")
        sys.exit(SKIPPED)
    environment = dict(os.environ, PATH=f"{pathlib.Path(program).parent}:{shoal.parent}:{os.environ['PATH']}",
                       OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    script = examples / f"cluster/{launcher}.sh"
    with Hosts(2, "1gbit") as hosts, tempfile.TemporaryDirectory() as folder:
        addresses = [f"10.77.0.{host + 1}" for host in range(2)]
        if launcher == "mpirun":
            agent = pathlib.Path(folder) / "agent"
            agent.write_text(AGENT.format(cases="\n".join(f"{address}) name={name};;" for address, name in
                                                          zip(addresses, hosts.names))))
            agent.chmod(0o755)
            environment["OMPI_MCA_plm_rsh_agent"] = str(agent)
            commands = [[script, ",".join(f"{address}:2" for address in addresses), "shoal", *TRAINING]]
        else:
            commands = [[script, addresses[0], 2, host, 2, "shoal", *TRAINING] for host in range(2)]
        processes = [start(hosts, host, command, environment) for host, command in enumerate(commands)]
        require_training(finish(processes))


if __name__ == "__main__":
    main()
