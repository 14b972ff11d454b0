"""Ray: notices of preemptions in a `train_loop`, and Ray's checkpoints that name steps of a run.

The manager is used in the `train_loop` of a trainer, or in a trial of Tune, as in any program: an
attempt that Ray starts again continues with `resume`. See docs/pytorch.md.

- `announce_preemption` passes a notice of Ray Train on to the manager. `train_loop` is not on the
  main thread of its process, so that no signal can be handled there.
- `checkpoint_of` makes a `ray.train.Checkpoint` that names a step of a run instead of holding a
  copy of it, and `step_of` reads it.

See docs/decisions/0059.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ray.train

from holdfast import CheckpointManager
from holdfast.errors import InvalidArgumentError, NotARunError

POINTER = "holdfast.json"
"""The only file in a checkpoint of Ray that names a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run.

    Attributes:
        directory: The run's absolute path or URL.
        step: The step.
    """

    directory: str
    step: int


def announce_preemption(manager: CheckpointManager) -> bool:
    """Announce a preemption to `manager` if Ray Train has a notice, and return whether it has.

    All ranks then save the same step as the checkpoint of the preemption, and
    `manager.reached_preemption` returns True from that step on. Continue the loop: Ray starts the
    trainer again when the node's deadline has passed, but takes a `train_loop` that returns for a
    finished one.

    Call it in `train_loop`, on all ranks at the same steps: `ray.train.get_preemption_info` is a
    barrier of all workers.
    """
    is_preempted = ray.train.get_preemption_info() is not None
    if is_preempted:
        manager.announce_preemption()
    return is_preempted


@contextlib.contextmanager
def checkpoint_of(directory: str | os.PathLike[str], step: int) -> Iterator[ray.train.Checkpoint]:
    """Yield a checkpoint for `ray.train.report` or `ray.tune.report` that names a step of a run.

    Ray copies a file of some bytes, and its own retention removes no more than that. The step is
    to be durable: after `manager.wait_until_finished` or `manager.close`. It can be read as long as
    the run's preservation policy keeps it.

    Args:
        directory: The run's path or URL. The processes that read the step need to see it there.
        step: The step.
    """
    text = os.fspath(directory)
    named = RunStep(directory=text if "://" in text else os.path.abspath(text), step=step)
    with tempfile.TemporaryDirectory(prefix="holdfast-ray-") as folder:
        Path(folder, POINTER).write_text(json.dumps(asdict(named)))
        yield ray.train.Checkpoint.from_directory(folder)


def step_of(checkpoint: ray.train.Checkpoint) -> RunStep:
    """Return the step that a checkpoint of `checkpoint_of` names.

    Read it with `holdfast.open_run(named.directory).restore(named.step, like=...)`.

    Raises:
        NotARunError: The checkpoint is not one of `checkpoint_of`.
        InvalidArgumentError: Its file is damaged.
    """
    with checkpoint.as_directory() as folder:
        try:
            text = Path(folder, POINTER).read_text()
        except FileNotFoundError:
            raise NotARunError(
                f"read {checkpoint}: it has no {POINTER}, so it is not of "
                "holdfast.interop.ray.checkpoint_of; read it with what wrote it"
            ) from None
    try:
        named = json.loads(text)
        return RunStep(directory=str(named["directory"]), step=int(named["step"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"read {checkpoint}: expected a directory and a step in {POINTER}, found {text[:200]!r}"
        ) from error
