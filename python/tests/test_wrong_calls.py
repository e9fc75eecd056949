"""PY01, PY04: collectives with wrong arguments, and ranks that call different ones."""

import pytest
import torch
import torch.distributed as dist

from ranks import errors_on_ranks, on_ranks

WRONG = {
    "parts of another size": (
        lambda r: dist.all_gather_into_tensor(torch.empty(5), torch.ones(2)),
        "output must be size\\(\\) times the input",
    ),
    "too few outputs": (lambda r: dist.all_gather([torch.empty(2)], torch.ones(2)), "one for each of the group's 2"),
    "another shape": (
        lambda r: dist.all_gather([torch.empty(3, 2), torch.empty(3, 2)], torch.ones(2, 3)),
        "has shape \\[3, 2\\], but its own tensor has shape \\[2, 3\\]",
    ),
    "another dtype": (
        lambda r: dist.reduce_scatter_tensor(torch.empty(1, dtype=torch.float64), torch.ones(2)),
        "tensors differ in dtype: (Double and Float|Float and Double)",
    ),
    "an unsupported reduction": (
        lambda r: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
        "band is not defined for Float",
    ),
    "a rank outside": (lambda r: dist.broadcast(torch.ones(2), src=5), "5"),
    "to itself": (lambda r: dist.send(torch.ones(2), dst=r), "to itself|same"),
    "uneven split": (lambda r: dist.all_to_all_single(torch.empty(3), torch.ones(3)), "divide equally"),
    "exchange in place": (lambda r: dist.all_to_all_single((t := torch.ones(4)), t), "must not share memory"),
    "exchange of lists in place": (
        lambda r: dist.all_to_all((t := list(torch.ones(4).split(2))), t),
        "must not share memory",
    ),
    "exchange within one tensor": (
        lambda r: dist.all_to_all_single((t := torch.ones(6))[:4], t[2:]),
        "must not share memory",
    ),
    "sparse maximum": (
        lambda r: dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX),
        "not reduced with max",
    ),
    "sparse mean of bool": (
        lambda r: dist.all_reduce(torch.eye(2, dtype=torch.bool).to_sparse(), op=dist.ReduceOp.AVG),
        "avg is not defined for Bool",
    ),
    "a mean of two dtypes": (
        lambda r: dist.reduce_scatter_tensor(
            torch.empty(1, dtype=torch.int8), torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG
        ),
        "tensors differ in dtype: (Int and Char|Char and Int)",
    ),
}


def test_PY01_wrong_arguments_raise_before_anything_is_sent():
    def run(rank):
        for name, (call, text) in WRONG.items():
            try:
                with pytest.raises((RuntimeError, ValueError), match=text):
                    call(rank)
            except BaseException as error:
                raise AssertionError(f"{name}: {error}") from error
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2, 2], name

    on_ranks(run)


@pytest.mark.parametrize(
    "call",
    [
        lambda r: dist.all_reduce(torch.ones(3 + r)),
        lambda r: dist.all_reduce(torch.ones(3, dtype=torch.int32 if r else torch.float32)),
        lambda r: dist.broadcast(torch.ones(3), src=r),
        lambda r: dist.barrier() if r else dist.all_reduce(torch.ones(3)),
        lambda r: dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2)) if r else dist.all_reduce(torch.ones(2)),
    ],
)
def test_PY04_ranks_that_disagree_hear_the_same_sentence(call):
    errors = errors_on_ranks(call)
    said = [error.split(" (detected by")[0] for error in errors]
    assert said[0] == said[1] and said[0].startswith("DisagreeError: ranks called different operations"), errors
