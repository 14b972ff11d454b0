"""What several hosts cost the steps between checkpoints: each host is a process with its own agent.

A call that waits for anything, be it another process, a lock or a collective, gives up its
processor: the kernel counts that as a voluntary context switch of the thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STEP_SECS = 0.01
STATE_ROWS = 1024
WAIT_SECS = 300.0


def steps_between(*, directory: str, hosts: int, steps: int) -> dict[str, Any]:
    """Over all hosts: the calls of `save` that took no checkpoint, what they took, their waits."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(hosts):
        ours, theirs = context.Pipe()
        arguments = (directory, address, hosts, rank, steps, theirs)
        processes.append(context.Process(target=_train, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        found = [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()
            process.join()
    call_secs = [secs for one in found for secs in one["call_secs"]]
    return {
        "hosts": hosts,
        "saves": min(one["saves"] for one in found),
        "calls": len(call_secs),
        "waits": sum(one["waits"] for one in found),
        "call_secs": statistics.median(call_secs),
        "call_p999_secs": statistics.quantiles(call_secs, n=1000)[-1],
    }


def _received(pipe: Connection) -> dict[str, Any]:
    if not pipe.poll(WAIT_SECS):
        raise TimeoutError("a host said nothing")
    found: dict[str, Any] = pipe.recv()
    return found


def _train(
    directory: str, address: str, count: int, rank: int, steps: int, pipe: Connection
) -> None:
    """One host's process: its own name, RAM folder and agent."""
    ram = Path(os.environ["HOLDFAST_RAM"]) / f"host-{rank}"
    ram.mkdir(parents=True, exist_ok=True)
    os.environ.update(HOLDFAST_HOST=f"bench-{rank}", HOLDFAST_RAM=str(ram))
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import holdfast

    jax.distributed.initialize(address, count, rank)
    everywhere = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec())
    state = {"w": jax.jit(lambda: jnp.ones((STATE_ROWS, 1024)), out_shardings=everywhere)()}
    call_secs, waits, saves = [], 0, 0
    with holdfast.CheckpointManager(directory) as manager:
        manager.resume(state)
        for step in range(steps):
            time.sleep(STEP_SECS)
            before, started = _waits(), time.perf_counter()
            is_saved = manager.save(step, state)
            secs = time.perf_counter() - started
            if is_saved:
                saves += 1
            else:
                call_secs.append(secs)
                waits += _waits() - before
    pipe.send({"call_secs": call_secs, "waits": waits, "saves": saves})
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
