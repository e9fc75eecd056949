"""Lengths of files: 300 lines of a source, 400 of a test."""

import os

LIMITS = {"include": 300, "src": 300, "python/shoal": 300, "python/src": 300, "tests": 400, "python/tests": 400}
# Longer files, and how long they are. They may only get shorter; an entry goes once its file is within the limit.
LONGER = {
    "include/shoal/fsdp.h": 354,
    "include/shoal/hooks.h": 325,
    "include/shoal/optim.h": 372,
    "include/shoal/training.h": 332,
    "python/shoal/elastic.py": 307,
    "python/shoal/optim/_state.py": 323,
    "python/src/wrappers/python_optimizer.cpp": 333,
    "src/checkpoint/pt/unpickle.cpp": 416,
    "src/cli/plan/plan_command.cpp": 318,
    "src/cli/train/report.cpp": 306,
    "src/cli/train/train_command.cpp": 347,
    "src/comm/backend/group_backend.cpp": 390,
    "src/comm/gossip/shared_channel.cpp": 378,
    "src/comm/gossip/socket_channel.cpp": 324,
    "src/comm/group/group.cpp": 314,
    "src/comm/group/pending_work.cpp": 324,
    "src/comm/membership/generations.cpp": 408,
    "src/comm/membership/store_board.cpp": 343,
    "src/comm/membership/store_table.cpp": 319,
    "src/comm/mpi/mpi.cpp": 343,
    "src/comm/reduce/reduce_blocks.cpp": 306,
    "src/comm/rendezvous/rendezvous.cpp": 452,
    "src/comm/shm/host_memory.cpp": 302,
    "src/comm/store/job_store.cpp": 388,
    "src/comm/tcp/operations.cpp": 312,
    "src/comm/transport/c10d_transport.cpp": 356,
    "src/engine/changes/operator_watch.cpp": 334,
    "src/engine/checkpoint/contents.cpp": 303,
    "src/engine/gradients/accumulated_gradients.cpp": 338,
    "src/engine/gradients/backward_tracker.cpp": 338,
    "src/engine/gradients/earlier_sums.cpp": 355,
    "src/engine/paging/pager.cpp": 340,
    "src/engine/sharded/sharded_optimizer_elastic.cpp": 322,
    "src/engine/sharded/sharded_state.cpp": 320,
    "src/launch/job.cpp": 387,
    "src/planning/strategy_plan.cpp": 420,
    "src/strategy/zero/oss_shares.cpp": 319,
    "src/strategy/zero/sharded_ddp.cpp": 393,
    "src/training/replan.cpp": 318,
    "tests/elastic/elastic_run.h": 405,
}


def lengths(root):
    """{path relative to the repository: (number of lines, limit)} of all C++ and Python files."""
    found = {}
    for top, limit in LIMITS.items():
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                if name.endswith((".h", ".cpp", ".py")):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as f:
                        found[os.path.relpath(path, root)] = (sum(1 for _ in f), limit)
    return found


def violations(root, longer=None):
    longer = LONGER if longer is None else longer
    found = lengths(root)
    for path, (count, limit) in sorted(found.items()):
        if path not in longer and count > limit:
            yield "%s: %d lines, more than %d" % (path, count, limit)
        elif path in longer and count > longer[path]:
            yield "%s: %d lines, more than the %d of lengths.py, which may only get fewer" % (path, count, longer[path])
        elif path in longer and count <= limit:
            yield "%s: %d lines are within the limit; remove its entry of lengths.py" % (path, count)
    for path in sorted(set(longer) - set(found)):
        yield "%s: has an entry of lengths.py, and does not exist" % path
