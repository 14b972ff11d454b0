"""Run the trainer of the demo: a training loop that Holdfast checkpoints.

`python -m holdfast.demo.train --run DIR --log FILE --steps N` continues the run until step N is
reached or the process is preempted. With `--hosts` it is the process of one host of a job of
several hosts, connected by `jax.distributed`. The calls on `manager` are everything that Holdfast
requires of a training loop. The rest is training, and the journal that the demo reads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import xxhash

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.clock import SystemClock
from holdfast.demo import journal, model
from holdfast.demo.corpus import load_corpus
from holdfast.demo.data import Batches, BatchShape, batch_iterator
from holdfast.manager.restoring import RestoreReport

_JOIN_SECS = 60

_CLOCK = SystemClock()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return 0 when the last step is finished or the process was preempted."""
    options = _parse(arguments)
    if options.hosts > 1:
        jax.distributed.initialize(
            options.coordinator, options.hosts, options.host, initialization_timeout=_JOIN_SECS
        )
    try:
        with journal.Journal(options.log) as log:
            train(options, log)
    except Exception:
        if options.hosts > 1:
            _end_at_once()
        raise
    if options.hosts > 1:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    return 0


def _end_at_once() -> NoReturn:
    """Exit at once after an error.

    JAX's shutdown would wait for the other processes, which wait for this one in a step.
    """
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def train(options: argparse.Namespace, log: journal.Journal) -> None:
    """Run the training loop, and append its records to `log`."""
    # The batch is divided by the hosts, so that a step has about the same size for any number.
    shape = BatchShape(windows=max(1, BatchShape().windows // options.hosts))
    config = model.ModelConfig(context=shape.context)
    optimizer = model.make_optimizer(options.steps)
    train_step = model.make_train_step(config, optimizer)

    init_rng, rng = jax.random.split(jax.random.key(options.seed))
    params, opt_state = model.make_init(config, optimizer)(init_rng)
    state: dict[str, Any] = {
        "params": params,
        "opt_state": opt_state,
        "rng": model.everywhere(rng),
        "data": Batches(
            batch_iterator(
                load_corpus(), shape, seed=options.seed, host=options.host, hosts=options.hosts
            )
        ),
        "tokens_seen": 0,
    }

    with holdfast.CheckpointManager(
        options.run,
        save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(
            minimum_interval_secs=options.interval_secs
        ),
        preservation_policy=preservation_policy.LatestN(3),
        # Saving to RAM is cheap, so the next save to it starts as soon as the last one has ended.
        ram=holdfast.RamTier(
            save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy()
        ),
    ) as manager:
        start, state = manager.resume(state)
        log.append(_started(start, manager.last_restore))

        preempted_at = None
        for step in range(start, options.steps):
            state, record = _do_step(step, state, train_step, shape.tokens * options.hosts)
            log.append(record)

            began = time.perf_counter()
            taken = manager.save(step, state)
            log.append(journal.Saved(step=step, taken=taken, secs=time.perf_counter() - began))
            if manager.reached_preemption(step):
                preempted_at = step
                break
        else:
            manager.finish(options.steps - 1, state)

    if preempted_at is None:
        log.append(_finished(state))
    else:
        log.append(journal.Preempted(time=_now(), step=preempted_at))


def _do_step(
    step: int, state: dict[str, Any], train_step: model.TrainStep, tokens: int
) -> tuple[dict[str, Any], journal.Step]:
    began = time.perf_counter()
    batch, batch_digest = state["data"].take()
    params, opt_state, rng, loss = train_step(
        state["params"], state["opt_state"], state["rng"], batch
    )
    loss_value = float(loss)  # Waits until the step is finished.
    record = journal.Step(
        time=_now(),
        step=step,
        loss=loss_value.hex(),
        batch=batch_digest,
        secs=time.perf_counter() - began,
    )
    state = {
        "params": params,
        "opt_state": opt_state,
        "rng": rng,
        "data": state["data"],
        "tokens_seen": state["tokens_seen"] + tokens,
    }
    return state, record


def _started(start: int, restore: RestoreReport | None) -> journal.Started:
    restored = None
    if restore is not None:
        restored = journal.Restored(
            step=restore.step,
            attempt=restore.attempt,
            sources=dict(restore.sources),
            skipped=[
                *(f"step {step}, attempt {by}: {why}" for step, by, why in restore.skipped),
                *restore.passed_over,
            ],
            secs=restore.seconds,
        )
    return journal.Started(time=_now(), pid=os.getpid(), first_step=start, restored=restored)


def _finished(state: dict[str, Any]) -> journal.Finished:
    return journal.Finished(
        time=_now(),
        params=digest(state["params"]),
        opt_state=digest(state["opt_state"]),
        rng=digest(jax.random.key_data(state["rng"])),
        batches=state["data"].digest,
        tokens_seen=state["tokens_seen"],
    )


def digest(tree: Any) -> str:
    """Return a digest over the paths, dtypes, shapes and bits of all arrays of a tree."""
    state = xxhash.xxh3_128()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        state.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def _now() -> float:
    return _CLOCK.now().timestamp()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holdfast.demo.train", description=__doc__)
    parser.add_argument("--run", required=True, type=Path, help="the run's durable directory")
    parser.add_argument("--log", required=True, type=Path, help="the journal, appended to")
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval-secs", type=float, default=1.0)
    parser.add_argument("--hosts", type=int, default=1, help="how many hosts the job has")
    parser.add_argument("--host", type=int, default=0, help="which of them this process is on")
    parser.add_argument("--coordinator", help="the address of the job's `jax.distributed` service")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
