"""examples/cluster/mpirun.sh and torchrun.sh over two hosts: network namespaces, with a stand-in for ssh.

    python two_hosts_test.py SHOAL EXAMPLES mpirun|torchrun [TORCHRUN]

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


def start(hosts, host, command, environment):
    return subprocess.Popen(["ip", "netns", "exec", hosts.names[host], "unshare", "--pid", "--fork", "--kill-child",
                             "--mount-proc", *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def main():
    shoal, examples = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    launcher = sys.argv[3]
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
        try:
            outputs = [process.communicate(timeout=150)[0] for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            sys.exit("failed: not over within 150 s\n" + "\n".join(process.communicate()[0] for process in processes))
    print("\n".join(outputs))
    if any(process.returncode != 0 for process in processes):
        sys.exit("failed: " + ", ".join(str(process.returncode) for process in processes))
    if not any("on 4 rank(s), ddp, host+tcp" in output for output in outputs):
        sys.exit("failed: no training on four ranks of two hosts")


if __name__ == "__main__":
    main()
