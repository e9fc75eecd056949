"""A source is found by its name: it has a header of its name, or begins with the name of a header and "_".

The header lies in the source's folder, or is a public one. Folders of strategies have the same names for the same jobs.
"""

import os

JOBS = ("build", "checkpoint", "elastic", "options")

# Sources without such a header, by folder. The list may only shrink.
EXCEPTIONS = {
    "src": "pch",
    "src/cli": "main",
    "src/cli/launch": "doctor launch_command",
    "src/cli/telemetry": "flight_command report_command top_command",
    "src/cli/train": "between_steps train_command",
    "src/comm/group": "agree work",
    "src/comm/membership": "newcomers",
    "src/comm/mpi": "loaded_mpi no_mpi",
    "src/comm/telemetry": "differences timeline waits",
    "src/comm/topology": "file matchings registry report round without",
    "src/comm/transport": "no_nccl",
    "src/engine/checkpoint": "module replicated",
    "src/engine/hooks": "communication_hook compress post_local_sgd power_sgd quantize top_k",
    "src/engine/wrapper": "changed_parameters timers wrap",
    "src/launch": "options",
    "src/loop": "distributed_sampler mean_metric",
    "src/module": "convert_sync_batch_norm",
    "src/optim":
        "accum_adam adafactor decay_groups fused_adagrad fused_adam fused_sgd grad_scaler lamb muon muon_with_adamw",
    "src/strategy/decentralized": "changed_parameters rejoin resume step",
    "src/strategy/local_updates": "source",
    "src/strategy/megatron": "distributed_optimizer",
    "src/strategy/shard_gossip": "hosts mean",
    "src/strategy/zero": "oss oss_elastic oss_second_owners oss_shares sharded_ddp",
    "src/training": "options registry replan",
    "src/training/strategies": "alone hybrid_gossip",
}


def stem(path):
    return os.path.splitext(os.path.basename(path))[0]


def check_file_names(files):
    """Violations of the names of sources. files: {path: text} of all headers and sources."""
    headers = {}
    for path in files:
        if path.endswith(".h"):
            headers.setdefault("include" if path.startswith("include/") else os.path.dirname(path), set()).add(stem(path))
    excepted = {os.path.join(folder, name + ".cpp") for folder, names in EXCEPTIONS.items() for name in names.split()}
    for path in sorted(excepted - set(files)):
        yield "%s: EXCEPTIONS in file_names.py names it, and there is none" % path
    for path in sorted(files):
        if not path.endswith(".cpp"):
            continue
        folder, name = os.path.dirname(path), stem(path)
        known = headers.get(folder, set()) | headers.get("include", set())
        has_header = name in known or any(name.startswith(header + "_") for header in known)
        fits = has_header or os.path.dirname(folder) == "src/strategy" and name in JOBS
        if fits == (path in excepted):
            yield "%s: %s" % (path, "it need not be in EXCEPTIONS of file_names.py" if fits else
                              "it has no header of its name, and does not begin with one's name and '_'")
