"""Makes decent_vectors.h: what decent-dp's optimizers and schedule give, for the tests of shoal's.

    python tests/optim/decent_vectors.py > tests/optim/decent_vectors.h && clang-format -i tests/optim/decent_vectors.h
"""

from importlib.metadata import version

from decent_dp import optim
from vectors import rates, run, show


def cosine(optimizer):
    return optim.lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=9, t_warmup=4, cosine_eta_min=0.05)


def main():
    mixed = [(3, 5), (4,), (2, 3, 4), ()]
    other = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "accum_iter": 3}
    print("#pragma once\n// decent-dp %s; made by decent_vectors.py.\n" % version("decent-dp"))
    print("#include <vector>\n\nnamespace shoal::vectors {\n")
    show("accum_adam", run(optim.AccumAdam, mixed, lr=1e-2))
    show("accum_adam_options", run(optim.AccumAdam, mixed, **other))
    show("accum_adamw", run(optim.AccumAdamW, mixed, lr=1e-2))
    show("accum_adamw_options", run(optim.AccumAdamW, mixed, **other))
    show("decent_cosine_with_warmup", rates(cosine))
    print("}  // namespace shoal::vectors")


if __name__ == "__main__":
    main()
