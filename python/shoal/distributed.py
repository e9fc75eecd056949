"""The backend of torch.distributed, and the groups behind process groups."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from . import _C
from ._C import Group, UsageError

__all__ = ["Options", "group_of", "host_groups", "joining"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the backend: init_process_group("shoal", pg_options=shoal.distributed.Options(transport="tcp")).

    transport: "auto", "host" (ranks of one host share memory), "tcp", "gloo" or "mpi", as WorldOptions::transport in C++.
    """

    transport: str = "auto"


def group_of(process_group: dist.ProcessGroup | Group | None = None) -> Group:
    """The group of ranks behind a process group of the backend "shoal"; None: the default process group; a group: itself.

    UsageError if the process group has another backend for CPU tensors, or if there is no process group.
    """
    if isinstance(process_group, Group):
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not a member of the process group")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(
            f"process_group is a {type(process_group).__name__}; give a process group of torch.distributed, or None for "
            "the default one (shoal has no device_ids, and options such as lr and every are given by name)"
        )
    if process_group is None:
        if not dist.is_initialized():
            raise UsageError('there is no process group: call torch.distributed.init_process_group("shoal") first')
        process_group = dist.group.WORLD
    group = _group_or_none(process_group)
    if group is None:
        raise UsageError(
            f'the process group has backend "{dist.get_backend(process_group)}" for CPU tensors; shoal works on its '
            'own backend: init_process_group("shoal"), or "cpu:shoal,cuda:nccl"'
        )
    return group


def host_groups(process_group: dist.ProcessGroup | Group | None = None, size: int | None = None) -> tuple[Group, Group]:
    """(the ranks of this host, the ranks with this rank's index on all hosts). size: take so many consecutive ranks for a
    host. Collective."""
    return _C.host_groups(group_of(process_group), size)


def joining() -> bool:
    """Whether this process was started to join an elastic job that runs already, as World::joining() in C++. Known from the
    import on: such a process loads no checkpoint before shoal.Elastic is made, which gives it the job's state."""
    return _alone


def _group_or_none(process_group: dist.ProcessGroup) -> Group | None:
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for CPU tensors
        return None
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around the backend.
    return _C.group_of_backend(getattr(backend, "wrapped_pg", backend))


def _create_backend(options, backend_options: Options | None) -> dist.Backend:
    global _timeout, _excepthook
    if not isinstance(backend_options, (Options, type(None))):
        raise UsageError(
            f"pg_options of the backend shoal are shoal.distributed.Options, not {type(backend_options).__name__}"
        )
    if options.timeout < timedelta(milliseconds=1):
        raise UsageError("the timeout of a process group must be at least 1 ms, and below 290,000 years, PyTorch's most")
    ranks = list(options.global_ranks_in_group)
    world = _group_or_none(dist.group.WORLD) if ranks and dist.is_initialized() else None
    if _given is not None:
        group = _given
    elif world is not None:
        if backend_options is not None:
            raise UsageError("sub-groups have the options of the default process group: pass none to new_group")
        # PyTorch's default stands for none: ranks are awaited as long as those of the default process group were.
        given = options.timeout if options.timeout != default_pg_timeout else None
        group = world.subgroup(ranks, given)
    else:
        _timeout, _excepthook = options.timeout, sys.excepthook
        transport = (backend_options or Options()).transport
        if options.group_size == 1 and not _alone:
            _C.refuse_leftover_rank()
        group = _C.join_world(options.store, options.group_rank, options.group_size, options.timeout, transport)
    return _C.make_backend(group, options.timeout)


_given: Group | None = None  # what _replace_default_group() makes a backend of
_timeout = timedelta(minutes=5)  # of the default process group
_excepthook = sys.excepthook  # before PyTorch's, which init_process_group puts around it to name the rank


def _replace_default_group(group: Group, store: dist.Store | None, generation: int) -> None:
    """The default process group is that of these ranks from now on, and all others have ended. store: in which they meet, maybe
    as others before; None for one rank. Not collective."""
    global _given
    if not dist.is_initialized():
        return
    name = dist.get_backend()
    backends = name if name == "shoal" else str(dist.get_backend_config())
    dist.destroy_process_group()
    if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
        sys.excepthook = _excepthook
    _given = group
    try:
        own = dist.HashStore() if store is None else dist.PrefixStore(f"torch/{generation}", store)
        dist.init_process_group(backends, store=own, rank=group.rank, world_size=group.size, timeout=_timeout)
    finally:
        _given = None


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """init_method="shoal://": rank and size from whatever launcher there is (torchrun, shoal launch, mpirun, srun), and a
    world of one rank without, as in a notebook. env:// knows the first two alone."""
    if urlsplit(url) != urlsplit("shoal://"):
        raise UsageError(f'init_method "{url}": "shoal://" takes rank and world_size from the launcher; give them with "tcp://"')
    if _alone:
        yield dist.HashStore(), 0, 1
        return
    rank, size, address, port, source = _C.find_place()
    by_env = source == "RANK and WORLD_SIZE" and (size > 1 or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys())
    if by_env:
        yield from dist.rendezvous("env://", timeout=timeout, **options)
    elif size == 1:
        yield dist.HashStore(), 0, 1
    else:
        here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size))
        if here < size and "MASTER_ADDR" not in os.environ:
            raise UsageError(f"{here} of {size} ranks are on this host: set MASTER_ADDR to the address of rank 0's host")
        host = f"[{address}]" if ":" in address else address
        yield from dist.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timeout, **options)


def _stand_alone() -> bool:
    """Whether this process is to join an elastic job. It is alone then until shoal.Elastic has made it a member, whatever the
    launcher says of the ranks: init_process_group("shoal") gives rank 0 of 1, by env://, too."""
    try:
        joins = _C.joins_a_job()
    except UsageError:  # the job has ended; init_process_group() says so
        return False
    if joins:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return joins


_alone = _stand_alone()
dist.register_rendezvous_handler("shoal", _rendezvous)
dist.Backend.register_backend("shoal", _create_backend, extended_api=True, devices=["cpu"])
