"""A cluster of two Slurm nodes on this machine, and the jobs of examples/cluster/slurm.sh on it.

    python slurm_test.py SHOAL EXAMPLES [PYTHON PACKAGES]

SHOAL is the program, EXAMPLES the folder examples/, PYTHON an interpreter that finds the package shoal in the folder PACKAGES; a
program in Python is tried with these. Needs root and the Debian packages slurm-wlm and munge; ends with code
77 (skipped) without. The daemons have a network, a mount and a process namespace of their own, in which everything ends
with this script; each node has process numbers of its own, so that shoal takes it for a host.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
NODES = {"shoal-a": "10.77.1.1", "shoal-b": "10.77.1.2"}
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "munged", "mungekey", "unshare", "ip", "mount")
INSIDE = "SHOAL_SLURM_TEST"
TRAINING = ("--data", "reference", "--model", "gpt", "--size", "tiny", "--steps", "400", "--save-every", "20")

# The backend of torch.distributed, with ranks from Slurm's variables.
IN_PYTHON = """
import torch
import torch.distributed as dist
import shoal
dist.init_process_group("shoal", init_method="shoal://")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
same = all(torch.equal(weights[0], each) for each in weights)
transport = shoal.distributed.group_of().transport
print(f"rank {dist.get_rank()} of {dist.get_world_size()} over {transport}: equal weights {same}", flush=True)
dist.destroy_process_group()
"""

CONFIGURATION = """
ClusterName=shoal
SlurmctldHost=shoal-a
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIPPED)


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options).stdout


def wait_for(what, condition, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            sys.exit(f"failed: no {what} within {seconds} s")
        time.sleep(0.1)


class Cluster:
    def __init__(self, folder):
        self.folder = folder
        self.daemons = []

    def start(self):
        folder = self.folder
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **NODES}.items()))
        run("mount", "--bind", hosts, "/etc/hosts")
        run("ip", "link", "set", "lo", "up")
        # Names are not resolved where there is no address but loopback's.
        run("ip", "link", "add", "nodes", "type", "veth", "peer", "name", "nobody")
        run("ip", "link", "set", "nodes", "up")
        for address in NODES.values():
            run("ip", "addr", "add", f"{address}/24", "dev", "nodes")
        run("hostname", "shoal-a")
        folder.chmod(0o755)
        (folder / "state").mkdir()
        lines = [f"NodeName={name} NodeHostname=shoal-a NodeAddr={address} Port={port} CPUs=2"
                 for port, (name, address) in enumerate(NODES.items(), 27818)]
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=folder, nodes="\n".join(lines)))
        os.environ["SLURM_CONF"] = str(configuration)
        run("mungekey", "-c", "-k", folder / "key")
        run("munged", f"--key-file={folder}/key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed", "--force")
        daemons = [["slurmctld", "-D"]]
        daemons += [["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "slurmd", "-D", "-N", n] for n in NODES]
        self.daemons = [subprocess.Popen(daemon, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL) for daemon in daemons]
        wait_for("idle nodes", self.ready, 20)

    def ready(self):
        states = subprocess.run(["sinfo", "-h", "-N", "-p", "normal", "-o", "%T"], check=False, capture_output=True, text=True)
        return states.stdout.split() == ["idle"] * len(NODES)

    def state(self, job):
        return re.search(r"JobState=(\w+)", run("scontrol", "show", "job", job))[1]

    def restarts(self, job):
        return int(re.search(r"Restarts=(\d+)", run("scontrol", "show", "job", job))[1])

    def end(self, job, state, seconds=120):
        ended = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED")
        found = wait_for(f"end of job {job}", lambda: self.state(job) in ended and self.state(job), seconds)
        assert found == state, f"job {job} ended as {found}, not {state}"
        # Steps end after their job.
        wait_for(f"end of the ranks of job {job}", lambda: "shoal" not in run("ps", "-eo", "comm").split(), 30)


class Test:
    def __init__(self, cluster, examples):
        self.cluster = cluster
        self.script = examples / "cluster/slurm.sh"
        self.folder = cluster.folder

    def submit(self, name, *options):
        """A job of the script; its number. The run's folder and the job's output are called `name`."""
        out = run("sbatch", "--parsable", f"--output={self.folder / name}.txt", *options, self.script, self.folder / name,
                  *TRAINING, "--json", self.folder / f"{name}.json")
        return out.strip()

    def output(self, name):
        return (self.folder / f"{name}.txt").read_text()

    def digest(self, name):
        return json.loads((self.folder / f"{name}.json").read_text())["params"]

    def saved(self, name):
        latest = self.folder / name / "latest"
        return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0

    def begin(self, name, *options):
        """A job that has saved a checkpoint and is going on."""
        job = self.submit(name, *options)
        wait_for(f"checkpoint of job {job}", lambda: self.saved(name) or self.ended_early(job, name), 90)
        return job

    def ended_early(self, job, name):
        if self.cluster.state(job) in ("FAILED", "COMPLETED"):
            sys.exit(f"failed: job {job} ended early\n{self.output(name)}")

    def srun(self, *options):
        return run("srun", "-N", 2, *options, "shoal", "train", "--data", "reference", "--model", "mlp", "--steps", 3)

    def starts_with_and_without_pmi(self):
        for options, source in (((), "SLURM_PROCID"), (("--mpi=pmi2",), "PMI_RANK")):
            out = self.srun(*options)
            assert "on 2 rank(s)" in out and "tcp" in out, out
            environment = run("srun", "-N", 2, *options, "env")
            assert environment.count(source + "=") == 2, environment

    def starts_programs_in_python(self, python, packages):
        """On one node and on two."""
        program = self.folder / "train.py"
        program.write_text(IN_PYTHON)
        environment = {**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
        for option, transport in (("-n", "host"), ("-N", "tcp")):
            out = run("srun", option, 2, python, program, env=environment)
            for rank in range(2):
                assert f"rank {rank} of 2 over {transport}: equal weights True" in out, out

    def train_elastic(self, name, options, command, kill):
        """An elastic training of 600 steps, in which `kill` is called once it is under way; its metrics."""
        metrics = self.folder / f"{name}.jsonl"
        train = ["shoal", "train", "--data", "reference", "--model", "mlp", "--steps", 600, "--threads", 1, "--elastic", 1,
                 "--silent-host-seconds", 2, "--metrics", metrics]
        with open(self.folder / f"{name}.txt", "w", encoding="utf-8") as out:
            line = [str(part) for part in ["srun", "-N", 2, "--no-kill", *options, *command, *train]]
            job = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            lines = lambda: metrics.read_text().splitlines() if metrics.exists() else []  # noqa: E731
            wait_for("steps of an elastic training", lambda: len(lines()) > 20 or job.poll() is not None)
            kill()
            job.wait(timeout=90)
        events = [json.loads(line) for line in lines()]
        steps = [event["step"] for event in events if "loss" in event]
        assert steps and steps[-1] - steps[0] == 599, self.output(name)
        wait_for("end of the ranks", lambda: "shoal" not in run("ps", "-eo", "comm").split(), 30)
        return [event for event in events if "generation" in event]

    def kill_rank(self, variable, number):
        """Ends the rank of which a variable has the value."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"train" in words[1:2] and f"{variable}={number}".encode() in variables:
                os.kill(int(process.name), 9)
                return
        sys.exit(f"failed: no rank has {variable}={number}")

    def goes_on_without_a_rank(self):
        """Ranks that srun starts: the job gets smaller. With a launcher on each node, a rank comes in its place."""
        changes = self.train_elastic("shrinks", ["-n", 3], [], lambda: self.kill_rank("SLURM_PROCID", 1))
        assert [change["ranks"] for change in changes] == [2], changes
        launch = ["bash", "-c", 'exec shoal launch --nnodes 2 --node-rank $SLURM_NODEID -n 2 --elastic 1:4 --max-restarts 1 '
                  f'--address {NODES["shoal-a"]} --port 29641 -- "$@"', "launch"]
        changes = self.train_elastic("replaced", ["--ntasks-per-node=1"], launch, lambda: self.kill_rank("RANK", 3))
        assert [change["ranks"] for change in changes] == [3, 4], changes

    def ends_when_cancelled(self):
        job = self.begin("cancelled")
        run("scancel", job)
        self.cluster.end(job, "CANCELLED")
        assert self.saved("cancelled") > 0

    def goes_on_when_put_back_into_the_queue(self, whole):
        job = self.begin("requeued")
        run("scontrol", "requeue", job)
        self.finish(job, "requeued", whole)

    def makes_way_and_goes_on(self, whole):
        job = self.begin("preempted")
        run("srun", "-N", 2, "--partition=urgent", "--exclusive", "true")
        self.finish(job, "preempted", whole)

    def finish(self, job, name, whole):
        """The job has been told to end: it saves, is started again, and gets to where a run without a stop does."""
        wait_for(f"second start of job {job}", lambda: self.cluster.restarts(job) == 1)
        wait_for(f"waiting job {job}", lambda: self.cluster.state(job) in ("PENDING", "RUNNING"))
        # Slurm waits two minutes by itself. Within the second in which it was put back the job would not be let start.
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"], check=False, capture_output=True)
        self.cluster.end(job, "COMPLETED")
        out = self.output(name)
        assert re.search(r"going on after step \d+", out), out
        assert self.digest(name) == self.digest(whole), out


def inside(examples, in_python):
    with tempfile.TemporaryDirectory(prefix="shoal-slurm-") as name:
        cluster = Cluster(pathlib.Path(name))
        try:
            cluster.start()
            test = Test(cluster, examples)
            test.starts_with_and_without_pmi()
            if in_python:
                test.starts_programs_in_python(*in_python)
            test.goes_on_without_a_rank()
            job = test.submit("whole")
            cluster.end(job, "COMPLETED")
            test.ends_when_cancelled()
            test.goes_on_when_put_back_into_the_queue("whole")
            test.makes_way_and_goes_on("whole")
        except BaseException as error:
            for log in sorted(cluster.folder.glob("*.log")):
                print(f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-25:]))
            if isinstance(error, subprocess.CalledProcessError):
                sys.exit(f"failed: {error}\n{error.output}")
            raise
        finally:
            # unshare holds SIGTERM back from the daemon that it has started.
            for daemon in cluster.daemons:
                daemon.kill()
            for daemon in cluster.daemons:
                daemon.wait()
    print("passed")


def main():
    shoal, examples = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    if INSIDE in os.environ:
        inside(examples, sys.argv[3:])
        return
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        skip("not installed: " + ", ".join(missing) + " (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        skip("namespaces and daemons need root")
    # What the test starts ends with the first process of the new process namespace.
    namespaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*namespaces, "true"], capture_output=True).returncode != 0:
        skip("namespaces are not allowed here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment.update({INSIDE: "1", "PATH": f"{shoal.parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1"})
    sys.exit(subprocess.run([*namespaces, sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
