"""Run the trainer of the demo: a training loop that Holdfast checkpoints.

`python -m holdfast.demo.train OPTIONS` continues the run until its last step is reached or the
process is preempted. OPTIONS are `learner.TrainerOptions` as JSON. The calls on `manager` are
everything that Holdfast requires of a training loop. The rest is training, and the journal that the
demo reads.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any, NoReturn

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.demo import journal
from holdfast.demo.data import Batches, BatchShape, batch_iterator, load_corpus
from holdfast.demo.learner import Learner, TrainerOptions
from holdfast.format.json_codec import decode
from holdfast.trainer.restore.restoring import RestoreReport


def main() -> None:
    """Train until the last step is finished or the process was preempted."""
    options = decode(sys.argv[1], TrainerOptions)
    learner = make_learner(options)
    try:
        with journal.Journal(options.journal) as log:
            train(options, learner, log)
    except Exception:
        if options.hosts > 1:
            _end_at_once()
        raise
    learner.leave_job()


def _end_at_once() -> NoReturn:
    """Exit at once after an error.

    The framework's shutdown would wait for the other processes, which wait for this one in a step.
    """
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def make_learner(options: TrainerOptions) -> Learner:
    """Return the learner of the framework, connected to the other hosts."""
    if options.framework == "torch":
        from holdfast.demo.torch_learner import TorchLearner

        return TorchLearner(options)
    from holdfast.demo.jax_learner import JaxLearner

    return JaxLearner(options)


def train(options: TrainerOptions, learner: Learner, log: journal.Journal) -> None:
    """Run the training loop, and append its records to `log`."""
    # The batch is divided by the hosts, so that a step has about the same size for any number.
    shape = BatchShape(windows=max(1, BatchShape().windows // options.hosts))
    batches = batch_iterator(
        load_corpus(), shape, seed=options.seed, host=options.host, hosts=options.hosts
    )
    state: dict[str, Any] = {
        **learner.initial_state(),
        "data": Batches(batches),
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
            state, record = _do_step(step, state, learner, shape.tokens * options.hosts)
            log.append(record)
            manager.save(step, state)
            if manager.reached_preemption(step):
                preempted_at = step
                break
        else:
            manager.finish(options.steps - 1, state)

    if preempted_at is None:
        log.append(_finished(learner, state))
    else:
        log.append(journal.Preempted(step=preempted_at))


def _do_step(
    step: int, state: dict[str, Any], learner: Learner, tokens: int
) -> tuple[dict[str, Any], journal.Step]:
    began = time.perf_counter()
    batch, batch_digest = state["data"].take()
    state, loss = learner.train_step(state, batch)
    secs = time.perf_counter() - began
    record = journal.Step(step=step, loss=loss.hex(), batch=batch_digest, secs=secs)
    return {**state, "tokens_seen": state["tokens_seen"] + tokens}, record


def _started(start: int, restore: RestoreReport | None) -> journal.Started:
    return journal.Started(
        pid=os.getpid(),
        first_step=start,
        restored_step=None if restore is None else restore.step,
        sources={} if restore is None else dict(restore.sources),
    )


def _finished(learner: Learner, state: dict[str, Any]) -> journal.Finished:
    digests = learner.state_digests(state)
    return journal.Finished(
        params=digests.params,
        opt_state=digests.opt_state,
        rng=digests.rng,
        batches=state["data"].digest,
        tokens_seen=state["tokens_seen"],
    )


if __name__ == "__main__":
    main()
