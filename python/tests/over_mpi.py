"""Collectives of torch.distributed over the transport mpi; started by mpirun (test_launch.py)."""

import torch
import torch.distributed as dist

import shoal
dist.init_process_group("shoal", init_method="shoal://", pg_options=shoal.distributed.Options(transport="mpi"))
rank, size = dist.get_rank(), dist.get_world_size()
assert shoal.distributed.group_of().transport == "mpi"
equal = [torch.empty(3) for _ in range(size)]
dist.all_gather(equal, torch.full((3,), float(rank)))
assert [one.tolist() for one in equal] == [[float(r)] * 3 for r in range(size)]
uneven = [torch.empty(r + 1) for r in range(size)]
dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
assert [one.tolist() for one in uneven] == [[float(r)] * (r + 1) for r in range(size)]
sent = [torch.full((r + 1,), 10.0 * rank + r) for r in range(size)]
received = [torch.empty(rank + 1) for _ in range(size)]
dist.all_to_all(received, sent)
assert [one.tolist() for one in received] == [[10.0 * r + rank] * (rank + 1) for r in range(size)]
counts = [r + 1 for r in range(size)]
flat = torch.empty(size * (rank + 1))
dist.all_to_all_single(flat, torch.cat(sent), [rank + 1] * size, counts)
assert torch.equal(flat, torch.cat(received))
part = torch.empty(2)
dist.reduce_scatter(part, [torch.full((2,), float(rank + r)) for r in range(size)])
assert part.tolist() == [sum(range(size)) + size * rank] * 2
whole = torch.full((5, 4), rank + 1.0).t()
dist.all_reduce(whole)
assert bool((whole == size * (size + 1) / 2).all())
try:
    dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(r + 1) for r in range(size)])
    raise SystemExit("accepted")
except shoal.UsageError as error:
    assert "different sizes" in str(error), error
dist.barrier()
print("right", flush=True)
dist.destroy_process_group()
