"""Makes power_sgd.h: the losses of a small model under PyTorch's own PowerSGD and bfloat16 hooks, for the tests of shoal's.

    python tests/strategy/hooks/power_sgd.py > tests/strategy/hooks/power_sgd.h && clang-format -i tests/strategy/hooks/power_sgd.h
"""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power_sgd

RANKS = 2
STEPS = 50
SAMPLES = 16


def fill(shape, phase):
    """Like noise, but equal in every language."""
    count = math.prod(shape)
    return torch.tensor([math.cos(phase + 0.37 * i * i) for i in range(count)], dtype=torch.float64).reshape(shape)


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(),
                                torch.nn.Linear(32, 8)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * fill(parameter.shape, number))
    return model


def losses(hook, state):
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    if hook:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    result = []
    for step in range(STEPS):
        x = fill((SAMPLES, 12), 1.3 * step + 0.5 * dist.get_rank())
        y = torch.tanh(x @ fill((12, 8), 0.2))
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        result.append(mean.item() / RANKS)
    return result


def in_bf16(state, bucket):
    """Under its own name PyTorch takes this hook with NCCL alone."""
    return default_hooks.bf16_compress_hook(state, bucket)


def run(rank, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)

    # The factors to start from, which the hook draws, are to be equal in every language.
    torch.randn = lambda *shape, device=None, dtype=None: fill(shape, 0.1).to(dtype)
    # Its batched form does not run in this version: an assertion in its orthogonalisation.
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    curves = {"exact": losses(None, None), "rank_2": losses(power_sgd.powerSGD_hook, state),
              "bf16": losses(in_bf16, None)}
    if rank == 0:
        queue.put(curves)
    dist.barrier()
    dist.destroy_process_group()


def main():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=run, args=(rank, queue)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    curves = queue.get(timeout=900)
    for worker in workers:
        worker.join()
    print("#pragma once\n// PyTorch %s; made by power_sgd.py.\n" % torch.__version__.split("+")[0])
    print("#include <vector>\n\nnamespace shoal::power_sgd_losses {\n")
    for name, values in curves.items():
        print("inline const std::vector<double> %s{%s};\n" % (name, ", ".join(repr(value) for value in values)))
    print("}  // namespace shoal::power_sgd_losses")


if __name__ == "__main__":
    main()
