"""ELA04, ELA06: whole programs under the launcher, whose ranks come, or are those of several hosts."""

import os
import socket
import subprocess
import sys

import pytest

from forked import run_as_torchrun

# PyTorch's optimizers import torch._dynamo to mark what is not to be compiled: half of the time that a rank takes to start.
WITHOUT_DYNAMO = """
import sys, types
import torch
rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
sys.modules["torch._dynamo"] = torch._dynamo = types.SimpleNamespace(
    disable=lambda function, *rest, **more: function, graph_break=lambda: None, trace_rules=rules)
"""
PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import shoal

torch.set_num_threads(1)
dist.init_process_group("shoal", **eval(sys.argv[1]))
torch.manual_seed(0)
net = torch.nn.Linear(4, 1).double()


class CountingSGD(torch.optim.Optimizer):
    # Its state has an integer, and what it computes with it differs from what it would with a float32.
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                assert isinstance(state["step"], int)
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - 0.999 ** state["step"]) * group["betas"][0])


adamw = torch.optim.AdamW, {"lr": 1e-2}
if sys.argv[2] == "zero2":
    optimizer = shoal.optim.OSS(net.parameters(), adamw[0], process_group=shoal.distributed.host_groups()[0], **adamw[1])
elif sys.argv[2] == "megatron":
    model, optimizer = net, shoal.optim.DistributedOptimizer(net, adamw[0], shard_within_host=True, **adamw[1])
elif sys.argv[2] in ("fsdp", "hybrid"):
    sharding = "hybrid_shard" if sys.argv[2] == "hybrid" else "full_shard"
    model = shoal.nn.FullyShardedDataParallel(net, sharding_strategy=sharding)
    optimizer = shoal.optim.FullyShardedOptimizer(model, adamw[0], **adamw[1])
else:
    optimizer = CountingSGD(net.parameters(), 1e-2)
if sys.argv[2] == "zero2":
    model = shoal.nn.ShardedDataParallel(net, optimizer)
elif sys.argv[2] == "ddp":
    model = shoal.nn.DistributedDataParallel(net)
if sys.argv[2] == "ddp":
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=151)  # changes betas, too
else:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
x = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4)
sampler = shoal.data.DistributedSampler(x, seed=1)
elastic = shoal.Elastic(model, optimizer, sampler, state={"schedule": schedule}, keep_global_batch=12, batch_slices=12)
assert shoal.distributed.joining() == elastic.joining
first = dist.get_rank()
for epoch in range(elastic.first_epoch, 30):
    sampler.set_epoch(epoch)
    while elastic.in_epoch():
        for batch in torch.utils.data.DataLoader(x, batch_size=elastic.batch_size, sampler=sampler):
            def compute(begin, end):
                part = batch[begin:end]
                ((model(part) - part.sum(1, keepdim=True)) ** 2).mean().backward()
            complete = elastic.step(len(batch), compute, optimizer.step)
            if complete:
                optimizer.zero_grad()
                schedule.step()
            if not complete:
                break
    if epoch == 8 and first == 1 and not elastic.joining:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(sys.argv) == 3 and elastic.generation > 1 and dist.get_world_size() == 1 and epoch < 22:
        time.sleep(1)  # until the rank that is started in its place has come
weight = elastic.together(lambda: {name[-6:]: value for name, value in model.state_dict().items()}["weight"])
print("weights", [round(float(w), 12) for w in weight.flatten()], "rate", schedule.get_last_lr(), "steps", elastic.steps,
      "joined" if elastic.joining else "stayed", flush=True)
del elastic  # plain steps go on, also on a rank that has joined
for _ in range(2):
    ((model(x[:4]) - 1) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def written(folder, text=PROGRAM):
    program = folder / "program.py"
    program.write_text(WITHOUT_DYNAMO + text)
    return program


def alone(program, *arguments):
    """What one rank says that trains from the beginning to the end."""
    said = run_as_torchrun(program, *arguments, ranks=1)
    return said[said.index("weights") :].splitlines()[0]


@pytest.mark.parametrize(("method", "strategy"), [("{}", "ddp"), ('{"init_method": "shoal://"}', "fsdp")])
def test_ELA06_a_rank_of_a_python_program_is_replaced(method, strategy, tmp_path):
    program = written(tmp_path)
    line = [sys.executable, program, method, strategy]
    launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "2", "--elastic", "1:2", "--max-restarts", "1", "--"]
    ended = subprocess.run([*launch, *line], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [text[text.index("weights") :] for text in ended.stdout.splitlines() if "weights" in text]
    assert sorted(text.split()[-1] for text in said) == ["joined", "stayed"], ended.stdout + ended.stderr
    assert len({text.rsplit(" ", 1)[0] for text in said}) == 1, said
    assert "steps 150 " in said[0], said
    assert alone(program, method, strategy).rsplit(" ", 1)[0] == said[0].rsplit(" ", 1)[0]


def test_ELA01_a_launcher_is_the_only_worker_of_torchruns_agent(tmp_path):
    """The agent itself would end all its workers as one fails."""
    program = written(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "2", "--elastic", "1", "--"]
    line = [sys.executable, program, "{}", "ddp", "without newcomers"]
    ended = subprocess.run([*torchrun, *launch, *line], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 1 has ended; 1 rank goes on" in ended.stderr, ended.stderr
    assert "steps 150 stayed" in ended.stdout, ended.stdout


def test_ELA06_the_launcher_says_that_a_newcomer_has_left_the_job_again(tmp_path):
    """Its schedule is not the job's, which shows in its second step."""
    text = PROGRAM.replace('state={"schedule": schedule}, ', "")
    other = "LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    program = written(tmp_path, text.replace("OneCycleLR(optimizer, 1e-2, total_steps=151)", other))
    launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", "2", "--elastic", "1:2", "--max-restarts", "1", "--"]
    ended = subprocess.run([*launch, sys.executable, program, "{}", "ddp"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a rank has joined (number 2 of the launcher)" in ended.stderr, ended.stderr
    assert "rank 2 ended with exit code 1 after it had left the job again" in ended.stderr, ended.stderr


def can_make_hosts():
    return os.geteuid() == 0 and subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"]).returncode == 0


def on_two_hosts(strategy, folder, ranks=1, method="{}", newcomers=False, text=PROGRAM):
    """(exit code, output) of the launchers of two hosts with so many ranks each. Rank 1 kills itself."""
    if not can_make_hosts():
        pytest.skip("no namespaces of processes")
    program = written(folder, text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launchers = []
    for node in "01":
        host = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        launch = [os.environ["SHOAL_PROGRAM"], "launch", "-n", str(ranks), "--nnodes", "2", "--node-rank", node, "--port", port]
        elastic = ["--elastic", f"1:{2 * ranks}", "--max-restarts", "1"] if newcomers else ["--elastic", "1"]
        line = [*elastic, "--", sys.executable, program, method, strategy, *([] if newcomers else ["without newcomers"])]
        secret = {**os.environ, "SHOAL_SECRET": "0123456789abcdef0123456789abcdef"}
        launchers.append(subprocess.Popen([*host, *launch, *line], env=secret, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    return [(launcher.returncode, text) for launcher, text in zip(launchers, said, strict=True)]


def test_ELA01_ELA04_the_last_rank_of_a_host_dies_and_a_python_program_goes_on(tmp_path):
    first, second = on_two_hosts("fsdp", tmp_path)
    assert first[0] == 0 and second[0] == 137, (first, second)
    assert "rank 1 has ended; 1 rank goes on after step 45" in first[1], first[1]
    assert "steps 150 stayed" in first[1], first[1]


@pytest.mark.parametrize("strategy", ["hybrid", "zero2", "megatron"])
def test_ELA04_shards_that_each_host_has_outlive_a_rank(strategy, tmp_path):
    hosts = on_two_hosts(strategy, tmp_path, ranks=2)
    assert [code for code, _ in hosts] == [0, 0], hosts
    said = [line[line.index("weights") :] for _, text in hosts for line in text.splitlines() if "weights" in line]
    assert len(said) == 3 and len(set(said)) == 1 and "steps 150 stayed" in said[0], hosts
    assert alone(tmp_path / "program.py", "{}", strategy, "") == said[0]


@pytest.mark.parametrize(("method", "strategy"), [("{}", "ddp"), ('{"init_method": "shoal://"}', "hybrid"), ("{}", "fsdp")])
def test_ELA06_a_rank_of_another_host_is_replaced(method, strategy, tmp_path):
    hosts = on_two_hosts(strategy, tmp_path, method=method, newcomers=True)
    assert [code for code, _ in hosts] == [0, 0], hosts
    said = [line[line.index("weights") :] for _, text in hosts for line in text.splitlines() if "weights" in line]
    assert sorted(text.split()[-1] for text in said) == ["joined", "stayed"], hosts
    assert len({text.rsplit(" ", 1)[0] for text in said}) == 1 and "steps 150 " in said[0], hosts


GOSSIP = """
import os, signal
import torch, torch.distributed as dist
import shoal

torch.set_num_threads(1)
dist.init_process_group("shoal")
inside, across = shoal.distributed.host_groups()
host = across.rank
x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1).double()


def loss(model, host):  # the same on all ranks of a host, so that its mean does not depend on them
    return ((model(x) - x.sum(1, keepdim=True) * (1 + host)) ** 2).mean()


nets = [make(), make()]
optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
for step in range(30):
    for number, net in enumerate(nets):
        loss(net, number).backward()
    if step > 0:
        with torch.no_grad():
            for first, second in zip(nets[0].parameters(), nets[1].parameters()):
                mean = (first + second) / 2
                first.copy_(mean), second.copy_(mean)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

net = make()
model = shoal.nn.FullyShardedDataParallel(net, inside)
optimizer = shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, lr=1e-2)
elastic = shoal.Elastic(model, optimizer)
rank = dist.get_rank()


def mean_of_hosts():
    with optimizer.mean_parameters():
        if rank == 3 and elastic.steps == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        assert ranks.item() == dist.get_world_size()
        return net.weight.detach().clone()


while elastic.steps < 30:
    if rank == 1 and elastic.steps == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    if elastic.step(len(x), lambda: loss(model, host).backward(), optimizer.step):
        optimizer.zero_grad()
    if elastic.steps == 20:
        elastic.together(mean_of_hosts)
mean = elastic.together(mean_of_hosts)
far = max(float((a - b).detach().abs().max()) for a, b in zip(net.parameters(), nets[host].parameters()))
far = max(far, float((mean - (nets[0].weight + nets[1].weight) / 2).detach().abs().max()))
print("result", host, dist.get_world_size(), far < 1e-12, float((nets[0].weight - nets[1].weight).detach().abs().max()) > 1e-6)
"""


def test_ELA12_hosts_that_average_go_on_without_a_rank_each(tmp_path):
    hosts = on_two_hosts("", tmp_path, ranks=2, text=GOSSIP)
    assert [code for code, _ in hosts] == [0, 0], hosts
    said = sorted(line[line.index("result") :] for _, text in hosts for line in text.splitlines() if "result" in line)
    assert said == ["result 0 2 True True", "result 1 2 True True"], hosts
