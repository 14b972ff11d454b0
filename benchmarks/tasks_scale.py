"""What a checkpoint of thousands of hosts costs in planning and at the leader, without the hosts.

The plan is the real one, of placements as FSDP makes them. The leader is the real one too; hosts,
trainers and the network are those of the simulator, whose time costs nothing.
"""

from __future__ import annotations

import resource
import time
from datetime import UTC, datetime
from typing import Any

from holdfast.coordination.messages import CheckpointStatus
from holdfast.coordination.node import Node
from holdfast.coordination.settings import Settings, heartbeat_for
from holdfast.engine.planning.chunking import split_large
from holdfast.engine.planning.owners import assign_owners, shared
from holdfast.engine.planning.replicas import replicas_of
from holdfast.format.check import check_manifest
from holdfast.format.grid import Placement
from holdfast.format.names import AttemptId
from holdfast.format.ownership import Ownership
from holdfast.format.records import ArraySpec, CheckpointSpec, Manifest, PartReference
from holdfast.format.sealed import seal, unseal
from tests.coordination.oracle import Oracle
from tests.coordination.world import Shape, World

LAYERS = 120
RANKS_A_HOST = 8
BYTES_OF_A_PARAMETER = 12
"""In float32, with the two moments of Adam."""


def planned(*, hosts: int, state_tb: float, shards: int) -> dict[str, Any]:
    """The plan of one rank, the manifest that it becomes, and what reading that takes."""
    ranks = hosts * RANKS_A_HOST
    arrays = _arrays(ranks, state_tb * 1e12, min(shards, ranks))
    began = time.process_time()
    placements = split_large(arrays)
    owners = assign_owners(placements)
    owned_secs = time.process_time() - began
    copies = replicas_of(placements, owners, [rank // RANKS_A_HOST for rank in range(ranks)], 2)
    plan_secs = time.process_time() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    specs = tuple(
        ArraySpec(
            path=("state", f"{index:05d}"),
            shape=placement.shape,
            dtype=placement.dtype,
            chunk_shape=placement.chunk_shape,
            owners=of_array,
        )
        for index, (placement, of_array) in enumerate(zip(placements, shared(owners), strict=True))
    )
    data = seal(_manifest(specs, ranks))
    began = time.process_time()
    check_manifest(unseal(data, Manifest, "manifest"), "manifest")
    part_bytes = Ownership(specs).sizes.data_bytes.values()
    return {
        "arrays": len(arrays),
        "owned_secs": owned_secs,
        "plan_secs": plan_secs,
        "peak_mb": peak_mb,
        "copied_parts": len(copies),
        "largest_of_mean": max(part_bytes) / (sum(part_bytes) / ranks),
        "empty_parts": ranks - sum(map(bool, part_bytes)),
        "manifest_bytes": len(data),
        "read_secs": time.process_time() - began,
    }


def _arrays(ranks: int, state_bytes: float, shards: int) -> list[Placement]:
    """Matrices in shards, each held by every `shards`-th rank; vectors that all ranks hold."""
    unit = max(shards, 1024)
    layer_size = state_bytes / BYTES_OF_A_PARAMETER / LAYERS
    width = max(1, int((layer_size / 12) ** 0.5) // unit) * unit
    in_shards = tuple(tuple(range(shard, ranks, shards)) for shard in range(shards))
    everywhere = (tuple(range(ranks)),)
    matrices = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)]
    of_layer = [
        Placement(
            shape=shape,
            dtype="float32",
            chunk_shape=(shape[0] // shards, shape[1]),
            holders=in_shards,
        )
        for shape in matrices
    ]
    of_layer += [
        Placement(shape=(width,), dtype="float32", chunk_shape=(width,), holders=everywhere)
    ] * 2
    return of_layer * (3 * LAYERS)


def _manifest(specs: tuple[ArraySpec, ...], ranks: int) -> Manifest:
    reference = PartReference(record_digest="0" * 32, image_size_bytes=10**9)
    return Manifest(
        run_id="0" * 32,
        step=1000,
        attempt=AttemptId(1, "0" * 8),
        parts=(reference,) * ranks,
        checkpoint=CheckpointSpec(
            time=datetime(2026, 1, 1, tzinfo=UTC),
            metrics=None,
            arrays=specs,
            containers=(),
            values=(),
            process_values=(),
        ),
    )


def led(*, hosts: int, ranks_a_host: int) -> dict[str, Any]:
    """The processor time of the leader for a start, and for a checkpoint until it is durable."""
    Oracle.check_turn = lambda self, host: None  # type: ignore[method-assign]
    watch = _Watch()
    world = World(
        5,
        Shape(
            host_count=hosts,
            domain_size=1,
            ranks_a_host=ranks_a_host,
            window=1,
            every=3,
            copies=2,
            interval_secs=0.0,
            pace_secs=10.0,
        ),
        Settings(copies=2, heartbeat_secs=heartbeat_for(hosts)),
    )
    world.is_calm, world.restarts = True, False
    for host in world.hosts.values():
        host.start_agent()
    names = list(world.hosts)
    job = world.start_job(names)
    watch.node = world.hosts[names[0]].agent
    assert world.run(world.now + 1000, lambda: job.is_running)
    started_secs, started_at_secs = watch.secs, world.now
    watch.secs, watch.inputs = 0.0, 0
    counts = world.oracle.counts
    assert world.run(world.now + 5000, lambda: counts.get(CheckpointStatus.COMMITTED, 0) > 0)
    return {
        "start_secs": started_secs,
        "checkpoint_secs": watch.secs,
        "inputs": watch.inputs,
        "simulated_secs": world.now - started_at_secs,
    }


class _Watch:
    """The time in one node. Its inputs are too short for a clock of the processor."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.secs, self.inputs = 0.0, 0
        real = Node.handle

        def handle(node: Node, *arguments: Any) -> Any:
            if node is not self.node:
                return real(node, *arguments)
            began = time.perf_counter()
            found = real(node, *arguments)
            self.secs += time.perf_counter() - began
            self.inputs += 1
            return found

        Node.handle = handle  # type: ignore[method-assign, assignment]
