"""Thousands of hosts: what planning costs each rank, and a checkpoint its leader."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import Figure

PLANS = {
    "16,384 hosts, shards of 512": (16_384, 20.0, 512),
    "16,384 hosts, shards of 8": (16_384, 20.0, 8),
    "16,384 hosts, shards of 8,192": (16_384, 20.0, 8192),
    "4,096 hosts, shards of 512": (4096, 20.0, 512),
    "1,024 hosts, shards of 512": (1024, 20.0, 512),
    "16 hosts, shards of 128": (16, 1.0, 128),
}
"""Hosts, state in TB, ranks that share a replica of it."""
LEADERS = {
    "16 hosts": (16, 8),
    "256 hosts": (256, 8),
    "1,024 hosts": (1024, 1),
    "4,096 hosts": (4096, 1),
}
"""Hosts and ranks a host: the simulator visits all ranks at each step."""


def scale(bench: Bench) -> Iterator[Figure]:
    """Plans by size and sharding; the leader of one checkpoint by the number of hosts."""
    for state, (hosts, state_tb, shards) in PLANS.items():
        found = bench.worker("planned", hosts=hosts, state_tb=state_tb, shards=shards)
        print(f"  {state}: {found}", flush=True)
        for row, key, wanted, unit in (
            ("planning on each rank: processor time", "plan_secs", 10.0, "s"),
            ("planning on each rank: peak memory of the process", "peak_mb", 4000.0, "MB"),
            ("the largest part, of the mean", "largest_of_mean", 1.1, ""),
        ):
            yield Figure(
                row=row,
                state=state,
                reached=found[key],
                wanted=wanted,
                at_most=True,
                unit=unit,
                measured=found,
            )
    for state, (hosts, ranks_a_host) in LEADERS.items():
        found = bench.worker("led", hosts=hosts, ranks_a_host=ranks_a_host)
        print(f"  {state}: {found}", flush=True)
        yield Figure(
            row="the leader's processor while a checkpoint is made durable, of one core",
            state=state,
            reached=found["checkpoint_secs"] / found["simulated_secs"],
            wanted=0.1,
            at_most=True,
            measured=found,
        )
