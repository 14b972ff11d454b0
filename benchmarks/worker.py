"""`python -m benchmarks.worker TASK JSON`: one measurement in a process of its own.

It prints one line of JSON. The tasks are functions of the modules named in `TASKS`.
"""

from __future__ import annotations

import importlib
import json
import sys

TASKS = {
    "limits": "benchmarks.tasks_saving",
    "train": "benchmarks.tasks_training",
    "budget": "benchmarks.tasks_training",
    "peak_memory": "benchmarks.tasks_training",
    "save": "benchmarks.tasks_saving",
    "fill": "benchmarks.tasks_restoring",
    "restore": "benchmarks.tasks_restoring",
    "restore_memory": "benchmarks.tasks_restoring",
    "reshard": "benchmarks.tasks_restoring",
    "not_due": "benchmarks.tasks_saving",
    "open_many": "benchmarks.tasks_restoring",
    "frozen": "benchmarks.tasks_saving",
    "pull": "benchmarks.tasks_peers",
    "in_bucket": "benchmarks.tasks_buckets",
    "start": "benchmarks.tasks_start",
    "watched": "benchmarks.tasks_watching",
    "steps_between": "benchmarks.tasks_hosts",
    "ranks_together": "benchmarks.tasks_ranks",
    "leaves": "benchmarks.tasks_leaves",
    "first_checkpoints": "benchmarks.tasks_first_minute",
    "first_minute": "benchmarks.tasks_first_minute",
    "replica_check": "benchmarks.tasks_replicas",
    "planned": "benchmarks.tasks_scale",
    "led": "benchmarks.tasks_scale",
    "torch_train": "benchmarks.tasks_torch",
    "torch_peak_memory": "benchmarks.tasks_torch",
    "torch_save": "benchmarks.tasks_torch",
    "torch_fill": "benchmarks.tasks_torch",
    "torch_restore": "benchmarks.tasks_torch",
}


def main() -> None:
    """Runs the task."""
    task, arguments = sys.argv[1], json.loads(sys.argv[2])
    module = importlib.import_module(TASKS[task])
    print(json.dumps(getattr(module, task)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
