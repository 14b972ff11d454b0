"""A world without random faults, and waits for expected results in it."""

from __future__ import annotations

from holdfast.coordination.messages import CheckpointStatus
from holdfast.coordination.settings import Settings
from holdfast.format.names import CheckpointId
from tests.coordination.jobs import Job
from tests.coordination.world import Shape, World

BOUND_SECS = 60.0


def make(host_count: int, **shape: object) -> World:
    fields = {
        "host_count": host_count,
        "domain_size": 1,
        "ranks_a_host": 1,
        "window": 1,
        "every": 0,
        "copies": 2,
        "interval_secs": 0.0,
        **shape,
    }
    world = World(5, Shape(**fields), Settings(copies=fields["copies"]))  # type: ignore[arg-type]
    world.is_calm = True
    world.restarts = False
    for host in world.hosts.values():
        host.start_agent()
    return world


def running(world: World, hosts: list[str] | None = None, **more: bool) -> Job:
    job = world.start_job(hosts or list(world.hosts), **more)
    assert world.run(world.now + BOUND_SECS, lambda: job.is_running)
    return job


def until(world: World, condition: object) -> None:
    assert world.run(world.now + BOUND_SECS, condition), "it has not come about in time"  # type: ignore[arg-type]


def checkpoint_of(world: World, step: int, number: int = 1) -> CheckpointId:
    """Return the checkpoint of a step in the attempt that has that number in storage."""
    return CheckpointId(step, world.storage.attempts[number].attempt)


def reached(world: World, status: CheckpointStatus, count: int = 1) -> bool:
    return world.oracle.counts.get(status, 0) >= count
