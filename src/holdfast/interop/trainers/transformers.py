"""Hugging Face's Trainer: `train(trainer, directory)` in the place of `trainer.train()`.

The weights, the optimizer, the learning rates, the random numbers and the trainer's own progress
are saved together after each step that is due, and a training that is started again continues from
the newest checkpoint, in the middle of an epoch too. The trainer skips the batches that it has
trained on, as it does for its own checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast.errors import InvalidArgumentError
from holdfast.interop.trainers.trainer_session import TrainerSession
from holdfast.torch import RandomState, Replicated

_STATE_FILE, _WEIGHTS_FILE = "trainer_state.json", "pytorch_model.bin"
_DURATIONS = ("_runtime", "_per_second", "_time")
"""How the names of durations end in the trainer's log."""
_SUMMARY = "train_runtime"
"""What the log's last entry of a call of `train` has."""


def train(trainer: Trainer, directory: str | os.PathLike[str], **options: Any) -> Any:
    """Train with checkpoints in `directory`, from the newest one there if there is one.

    Args:
        trainer: a Trainer, or an instance of a subclass. Its own checkpoints are not needed: pass
            `save_strategy="no"` in its arguments.
        directory: the run's path or URL.
        options: arguments of `holdfast.CheckpointManager`.

    Returns:
        What `trainer.train()` returns. After a preemption, the training has ended early.

    Raises:
        InvalidArgumentError: the trainer uses FSDP or DeepSpeed by its arguments, which load their
            weights in a way of their own.
        HoldfastError: as for `CheckpointManager`, its `save` and its `resume`.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise InvalidArgumentError(
            "train: expected a Trainer without FSDP and DeepSpeed in its arguments, found one with "
            "them; use holdfast.CheckpointManager in a loop of your own"
        )
    # The processes find each other by torch.distributed, which this starts.
    _ = trainer.args.device
    callback = _Callback(trainer, TrainerSession(directory, options))
    trainer.add_callback(callback)
    finishes = False
    try:
        with callback.checkpoint_folder() as folder:
            result = trainer.train(resume_from_checkpoint=folder)
        finishes = True
        return result
    finally:
        trainer.remove_callback(callback)
        callback.session.close(finishes=finishes)


class _Progress:
    """The trainer's progress: its state as the Trainer writes it beside its own checkpoints.

    The durations in its log differ in equal trainings. They have a key of their own, so that
    `holdfast prove` compares everything else. The summary at the end is of one call of `train`,
    and is left out.
    """

    host_times = ("durations",)

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        handler = self._trainer.callback_handler
        exported = [
            each
            for each in (*handler.callbacks, self._trainer.control)
            if isinstance(each, ExportableState)
        ]
        for each in exported:
            state.stateful_callbacks[type(each).__name__] = each.state()
        progress = json.loads(json.dumps(dataclasses.asdict(state)))
        entries = [entry for entry in progress["log_history"] if _SUMMARY not in entry]
        durations = [
            {name: entry.pop(name) for name in [*entry] if name.endswith(_DURATIONS)}
            for entry in entries
        ]
        return {"progress": {**progress, "log_history": entries}, "durations": durations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the Trainer has read it from the folder that it was given."""


def _state_text(state: dict[str, Any]) -> str:
    """Return a state of `_Progress` as the Trainer's file has it."""
    progress = state["progress"]
    entries = zip(progress["log_history"], state["durations"], strict=True)
    history = [entry | durations for entry, durations in entries]
    return json.dumps({**progress, "log_history": history})


class _Unlogged:
    """What the trainer has added up on this rank since its last log entry.

    The Trainer begins it anew with each call of `train`, so it is set when the training begins.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loss": trainer._tr_loss.item(),
            "since": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss.fill_(state["loss"])
        # The summary has the mean loss of the steps of this call alone.
        trainer._total_loss_scalar = -state["loss"]
        trainer._globalstep_last_logged = state["since"]
        trainer.current_flos = state["flos"]


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Saves after each step, and sets the state when the training begins.

    A step that the Trainer logs or evaluates, or that ends an epoch, is saved after that, before
    the next step: an evaluation may draw random numbers, and change the best metric, the learning
    rate and the patience of other callbacks.
    """

    def __init__(self, trainer: Trainer, session: TrainerSession) -> None:
        self._trainer, self.session = trainer, session
        self._step: int | None = None
        # The step that is not saved yet, because the Trainer still logs or evaluates it.
        self._unsaved: int | None = None
        self._random = RandomState()
        self._state: dict[str, Any] = {}
        self._of_ranks: dict[str, Any] = {}
        # The random numbers to set before the next step, once its batch has been made.
        self._drawn: dict[str, Any] | None = None

    @contextlib.contextmanager
    def checkpoint_folder(self) -> Iterator[str | None]:
        """Yield the folder that the Trainer continues from; None if the run has no checkpoint.

        It has the Trainer's progress, and no weights: this callback sets them in place.
        """
        newest = self.session.read("trainer")
        if newest is None:
            yield None
            return
        self._step, progress = newest
        silence = logging.getLogger("transformers.trainer")
        silence.addFilter(_has_weights)
        try:
            with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
                (Path(folder) / _STATE_FILE).write_text(_state_text(progress))
                torch.save({}, Path(folder) / _WEIGHTS_FILE)
                yield folder
        finally:
            silence.removeFilter(_has_weights)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._state = {
            "model": kwargs["model"],
            "optimizer": kwargs["optimizer"],
            "scheduler": kwargs["lr_scheduler"],
            "trainer": Replicated(_Progress(self._trainer)),
        }
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None:
            self._state["scaler"] = scaler
        self._of_ranks = {"rng": self._random, "unlogged": _Unlogged(self._trainer)}
        if self._step is not None:
            self.session.resume(self._step, self._state, self._of_ranks)
            self._drawn = self._random.state_dict()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_unsaved(control)
        # The first batch of an epoch draws numbers, and was not made yet when this was saved.
        if self._drawn is not None and _ends_epoch(state):
            self._set_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_unsaved(control)
        if self._drawn is not None:
            self._set_random()

    def _set_random(self) -> None:
        assert self._drawn is not None
        self._random.load_state_dict(self._drawn)
        self._drawn = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.is_preempted:
            return
        self._unsaved = state.global_step
        is_used = control.should_log or control.should_evaluate or control.should_save
        if not is_used and not _ends_epoch(state):
            self._save_unsaved(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.is_preempted:
            control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The training has ended. The Trainer may load the best weights after this.
        if _SUMMARY in kwargs["logs"]:
            self._save_unsaved(control)
            self.session.finish_last()

    def _save_unsaved(self, control: Any) -> None:
        if self._unsaved is None:
            return
        step, self._unsaved = self._unsaved, None
        self.session.save(step, {**self._state, **self._of_ranks})
        if self.session.is_preempted:
            control.should_training_stop = True


def _ends_epoch(state: Any) -> bool:
    """Return whether the last step was the last one of its epoch."""
    return state.epoch is not None and float(state.epoch).is_integer()


def _has_weights(record: logging.LogRecord) -> bool:
    """Return False for the Trainer's warning that the folder has no weights."""
    return not record.getMessage().startswith("There were missing keys in the checkpoint model")
