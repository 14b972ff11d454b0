"""Call the training again in the same process after ranks of its job were lost.

One process follows the orders of the launcher (`supervise.ranks`): it becomes a rank of a
generation, forms its process group, trains, and reports what became of that. Between two
generations everything stays that the program keeps outside of the training's call: the interpreter,
its modules, devices, compiled code, workers.

Invariants:
- When a process reports the failure of a generation, it holds nothing more of that: its managers
  have left the agent, with all accepted saves sealed in RAM, and its process group is destroyed.
- The training's call returns to the program only once it has returned on all ranks.

See docs/decisions/0064 and docs/decisions/0065.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.adapt.torch.groups import (
    Job,
    default_backend,
    form_group,
    interrupt_group,
    leave_group,
)
from holdfast.adapt.torch.held_state import HeldState
from holdfast.adapt.torch.survivors import SurvivorProcesses, SurvivorsFramework
from holdfast.clock import SystemClock
from holdfast.environment import STANDBY_VARIABLE
from holdfast.errors import HoldfastError
from holdfast.format.json_codec import decode
from holdfast.trainer import last_states, lifetime
from holdfast.trainer.checkpoint_manager import CheckpointManager
from holdfast.trainer.last_states import LastState
from holdfast.trainer.options import Options
from holdfast.trainer.process.end_report import follows_lost_process, trainer_error
from holdfast.trainer.process.imports import ImportRecord
from holdfast.trainer.process.rank_link import (
    TEXT_CHARS_MAX,
    Assigned,
    Broken,
    Failed,
    Finished,
    Left,
    RankLink,
    Ready,
    Released,
    Reraise,
    show_interruption_briefly,
)
from holdfast.trainer.ranks.rendezvous import begin_numbers_anew

LOOK_SECS, POLL_SECS = 0.5, 60.0
"""How often a spare looks for what the ranks have imported."""

log = logging.getLogger(__name__)


def surviving(
    train: Callable[[Job], Any],
    *,
    backend: str | None = None,
    timeout_secs: float | None = None,
    keep_last: bool = False,
) -> Any:
    """Call `train(job)`, and call it again in this process whenever ranks of the job were lost.

    The program is started by `holdfast run --nproc N --spares 1 -- python train.py`. Each call has
    the default process group of `torch.distributed` initialised for its ranks; `train` builds what
    belongs to a group anew (`DistributedDataParallel`, meshes, `fully_shard`), and its state by
    `manager.resume`. A process that waits as a spare calls `train` when it takes the place of a
    lost rank.

    Args:
        train: The training. It opens its manager itself.
        backend: As for `init_process_group`; None: NCCL for GPUs, and gloo.
        timeout_secs: How long a collective may take; None: PyTorch's own default.
        keep_last: Keep the state of each `save` by reference until the next one. If all survivors
            hold the same step unchanged when a rank is lost, they save it, and no step is repeated.
            It costs the time of a walk through the state at each step (docs/lost_ranks.md).

    Returns:
        What `train` has returned, once it has returned on all ranks. In a spare that was not needed
        the call ends the process instead.

    Raises:
        InvalidArgumentError: `holdfast run --nproc` has not started this process.
        ProcessLostError: `holdfast run` has ended.
        BaseException: What `train` has raised, if no lost rank is the reason.
    """
    return _Survivor(train, backend or default_backend(), timeout_secs, keep_last).run()


@dataclass(slots=True)
class _Kept:
    """The state that this process held when its generation was lost."""

    directory: str
    options: Options
    held: HeldState
    step: int


class _Survivor:
    """One process. Owned by its main thread."""

    def __init__(
        self,
        train: Callable[[Job], Any],
        backend: str,
        timeout_secs: float | None,
        keep_last: bool,
    ) -> None:
        self._keep_last = keep_last
        self._kept: _Kept | None = None
        self._train = train
        self._backend = backend
        self._timeout_secs = timeout_secs
        self._order: Assigned | None = None
        """The generation in which it trains."""
        self._link = RankLink.from_environment(os.environ, self._interrupt)
        self._result: Any = None
        self._has_trained = False
        self._has_finished = False
        """Whether the training has finished on all ranks of a generation."""

    def run(self) -> Any:
        show_interruption_briefly(self._role)
        _set_aside()
        self._link.report(Ready())
        error: Exception | None = None
        while (order := self._next_order()) is not None:
            if order.kept_step is not None:
                self._save_kept(order, order.kept_step)
                continue
            self._kept = None
            error = self._generation(order)
            if error is not None and not self._is_lost(order, error):
                raise error
        if error is not None and not self._has_finished:
            # The job was told to end before the next generation.
            raise error
        leave_group()
        if error is not None or not self._has_trained:
            # Others have finished the training.
            sys.exit(0)
        return self._result

    def _role(self) -> str:
        """Return, as text for users, what this process is in its job."""
        order = self._order
        return "a process that waits for a rank" if order is None else f"rank {order.rank}"

    def _interrupt(self, broken: Broken) -> None:
        """End the collectives of a generation that is over, on the thread that reads orders."""
        order = self._order
        if order is not None and order.generation == broken.generation:
            interrupt_group(order.pids, order.peers)

    def _next_order(self) -> Assigned | None:
        """Wait for the next generation; None: the training has ended."""
        folder = None if self._has_trained else os.environ.get(STANDBY_VARIABLE)
        while True:
            order = self._link.poll(LOOK_SECS if folder else POLL_SECS)
            match order:
                case Assigned():
                    return order
                case Released(has_finished):
                    self._has_finished = has_finished
                    return None
                case None if folder and _import_like_ranks(Path(folder)):
                    folder = None

    def _generation(self, order: Assigned) -> Exception | None:
        """Train in one generation; return the exception that has ended it, without its frames."""
        job = Job(
            rank=order.rank,
            world_size=order.world_size,
            local_rank=order.seat,
            generation=order.generation,
            lost_ranks=order.lost,
        )
        self._has_trained = True
        begin_numbers_anew()
        self._order = order
        states: list[LastState] = []
        try:
            with (
                lifetime.outliving_errors(),
                last_states.keeping(is_asked=self._keep_last) as states,
            ):
                form_group(job, order.store, self._backend, self._timeout_secs)
                self._result = self._train(job)
        except Exception as error:
            if self._keep_last:
                self._kept = _kept_of(states)
            return error
        self._link.report(Finished(order.generation))
        return None

    def _is_lost(self, order: Assigned, error: Exception) -> bool:
        """Leave a generation that has failed; return whether lost ranks are the reason."""
        report = trainer_error(error, rank=order.rank, last_step=None, time_secs=0.0)
        text, last_step = report.text[:TEXT_CHARS_MAX], lifetime.last_step_of_open()
        lifetime.leave_all()
        if not follows_lost_process(report):
            self._link.report(Failed(generation=order.generation, text=text))
            if not self._is_broken():
                return False
        _drop_frames(error)
        self._order = None
        interrupt_group(order.pids, order.peers)
        leave_group()
        step = self._kept.step if self._kept is not None else None
        self._link.report(
            Left(generation=order.generation, last_step=last_step, text=text, kept_step=step)
        )
        return True

    def _save_kept(self, order: Assigned, step: int) -> None:
        """Save the state that the survivors hold of a step, and leave again.

        Without it the next generation continues from the newest checkpoint, so a failure is only
        logged.
        """
        begin_numbers_anew()
        text = ""
        try:
            if self._kept is not None:
                _save(self._kept, order, step)
        except (HoldfastError, RuntimeError, OSError) as error:
            text = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
            log.warning("step %d, which the survivors hold, is not saved: %s", step, text)
            _drop_frames(error)
        lifetime.leave_all()
        self._kept = None
        self._link.report(Left(generation=order.generation, last_step=step, text=text))

    def _is_broken(self) -> bool:
        """Ask the launcher whether ranks of the generation were lost."""
        while True:
            match self._link.poll(POLL_SECS):
                case Broken():
                    return True
                case Reraise() | Released():
                    return False


def _kept_of(states: list[LastState]) -> _Kept | None:
    """Return the state that a lost generation has left unchanged; None: there is none."""
    if len(states) != 1 or not isinstance(states[0].held, HeldState):
        return None
    last, held = states[0], states[0].held
    if change := held.lost_with_a_rank() or held.change():
        log.info("step %d cannot be saved any more: %s", last.step, change)
        return None
    return _Kept(last.directory, last.options, held, last.step)


def _save(kept: _Kept, order: Assigned, step: int) -> None:
    """Save the state of a step as a job of the survivors, unless the run has it already."""
    snapshot = kept.held.of_survivors(order.survivors)
    if snapshot is None:
        log.warning("step %d is not saved: a part of it was held by lost ranks alone", step)
        return
    processes = SurvivorProcesses(order.rank, order.world_size, order.store)
    options = kept.options
    manager = CheckpointManager(
        kept.directory,
        save_decision_policy=options.save,
        preservation_policy=options.preservation,
        ram=options.ram,
        network=options.network,
        remote=options.remote,
        on_save_failure="raise",
        process=options.process,
        framework=SurvivorsFramework(processes, snapshot),
    )
    newest = manager.latest_step()
    if newest is None or newest < step:
        # Not by `manager.save`, which publishes the step as one that was made: it is made no more.
        asked_secs = SystemClock().monotonic()
        manager._parts.due_saves.save(step, snapshot, None, force=True, asked_secs=asked_secs)


def _drop_frames(error: BaseException) -> None:
    """Remove the tracebacks of an exception and of those that caused it."""
    links: list[BaseException] = [error]
    while links:
        link = links.pop()
        link.__traceback__ = None
        links += [each for each in (link.__cause__, link.__context__) if each is not None]
        link.__cause__ = link.__context__ = None


def _import_like_ranks(folder: Path) -> bool:
    """Import what a rank had imported by its second step; return whether that is known."""
    for path in folder.glob("imports-*.json"):
        try:
            record = decode(path.read_bytes(), ImportRecord)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):
            continue
        for name in record.modules:
            if name not in sys.modules:
                # The program itself meets the error, if it is one there too.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        _set_aside()
        return True
    return False


def _set_aside() -> None:
    """Take what exists now from the garbage collector: it then finds a lost group's rest quickly.

    The modules of PyTorch alone are half a million objects.
    """
    gc.collect()
    gc.freeze()
