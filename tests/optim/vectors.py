"""Makes vectors.h: what PyTorch's own optimizers give, for the tests of shoal's.

    python tests/optim/vectors.py > tests/optim/vectors.h && clang-format -i tests/optim/vectors.h
"""

import math

import torch
from torch.optim import lr_scheduler as schedulers

STEPS = 10


def fill(shape, f):
    count = math.prod(shape)
    return torch.tensor([f(i) for i in range(count)], dtype=torch.float64).reshape(shape)


def run(optimizer_type, shapes, **options):
    """All parameters after STEPS steps, one after the other; the inputs are those of inputs.h."""
    parameters = [fill(shape, lambda i: math.sin(1 + 0.7 * i)).requires_grad_() for shape in shapes]
    optimizer = optimizer_type(parameters, **options)
    for step in range(STEPS):
        for p, parameter in enumerate(parameters):
            parameter.grad = fill(parameter.shape, lambda i: math.cos(1.3 * step + 0.37 * i * i + p))
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def rates(make, steps=14):
    """The rates of the first steps, where the optimizer's own is 0.5."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.5)
    schedule = make(optimizer)
    result = []
    for step in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < steps:
            schedule.step()
    return result


def cosine(optimizer):
    warmup = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    down = schedulers.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.05)
    return schedulers.SequentialLR(optimizer, [warmup, down], milestones=[4])


def one_cycle(**options):
    return lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.5, total_steps=14, cycle_momentum=False,
                                                   **options)


def show(name, values):
    print("inline const std::vector<double> %s{%s};\n" % (name, ", ".join(repr(float(value)) for value in values)))


def main():
    mixed = [(3, 5), (4,), (2, 3, 4), ()]
    matrices = [(3, 5), (6, 4), (4, 4)]
    print("#pragma once\n// PyTorch %s; made by vectors.py.\n" % torch.__version__.split("+")[0])
    print("#include <vector>\n\nnamespace shoal::vectors {\n")
    show("adafactor", run(torch.optim.Adafactor, mixed))
    show("adafactor_options", run(torch.optim.Adafactor, mixed, lr=0.3, beta2_decay=-0.6, eps=(0.6, 0.9), d=1.5,
                                  weight_decay=0.1))
    show("muon", run(torch.optim.Muon, matrices, lr=1e-2))
    show("muon_options", run(torch.optim.Muon, matrices, lr=2e-3, weight_decay=0.3, momentum=0.8, nesterov=False,
                             ns_coefficients=(3.0, -4.0, 2.0), ns_steps=4, adjust_lr_fn="match_rms_adamw"))
    show("linear_warmup", rates(lambda optimizer: schedulers.LinearLR(optimizer, 0.25, total_iters=6)))
    show("cosine_with_warmup", rates(cosine))
    show("one_cycle", rates(one_cycle()))
    show("one_cycle_linear", rates(one_cycle(anneal_strategy="linear", pct_start=0.4, div_factor=5)))
    show("one_cycle_three_phases", rates(one_cycle(three_phase=True, final_div_factor=100)))
    print("}  // namespace shoal::vectors")


if __name__ == "__main__":
    main()
