"""Lightning: `HoldfastCallback(directory)` in a Trainer's callbacks, or `HoldfastCheckpointIO()`.

The callback is for every strategy. It saves after each optimizer step that is due, the last one of
an epoch when the next epoch begins, and `trainer.fit(module)` continues from the newest checkpoint
of the run. Parameters are filled in place, so that strategies that shard them need nothing more.
Dataloaders with a state, as torchdata's `StatefulDataLoader`, continue in the middle of an epoch;
others begin it again, as with Lightning's own checkpoints.

The plugin stores the checkpoints that `ModelCheckpoint` and `save_checkpoint` make, for strategies
that use a `CheckpointIO`: those that shard the model do not.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO

from holdfast import ProcessHooks, load, save
from holdfast.building import is_saved_one
from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, NotARunError, translated
from holdfast.interop.trainers.trainer_session import TrainerSession
from holdfast.torch import RandomState, Replicated

ARRAYS = ("state_dict", "optimizer_states")
"""The entries of Lightning's checkpoints that are stored as arrays, the others by `torch.save`."""
OTHERS = "others"


class HoldfastCallback(Callback):  # type: ignore[misc]
    """Saves and continues a `fit`; see the module.

    Args:
        directory: the run's path or URL.
        options: arguments of `holdfast.CheckpointManager`.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory, self._options = directory, options
        self._session: TrainerSession | None = None
        self._state: dict[str, Any] = {}
        self._of_ranks: dict[str, Any] = {}
        self._last = -1
        self._is_unsaved = False
        self._random = RandomState()
        # The random numbers before an epoch's loaders have drawn theirs, and those to set after it.
        self._undrawn = _Taken({})
        self._drawn: dict[str, Any] | None = None
        self._of_epoch: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run, and set all states if it has a checkpoint."""
        self._state = {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loop": Replicated(_Loop(trainer)),
            "callbacks": Replicated(_Callbacks(trainer, self)),
        }
        loaders, self._undrawn = _Loaders(trainer), _Taken({})
        self._of_ranks = {"rng": self._random, "data": loaders, "epoch_rng": self._undrawn}
        # Lightning requeues a Slurm job at SIGUSR1, unless something else handles the signal.
        hooks = ProcessHooks(preemption_signals=(signal.SIGTERM,))
        self._session = TrainerSession(self._directory, {"process": hooks} | self._options)
        progress = self._session.read("loop")
        if progress is not None:
            self._session.resume(progress[0], self._state, self._of_ranks)
            self._drawn = self._random.state_dict()
        self._last, self._is_unsaved, self._of_epoch = trainer.global_step, False, {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch where it was saved, or note where: its first batch saves that."""
        loaders: _Loaders = self._of_ranks["data"]
        if self._drawn is not None and self._undrawn.state:
            # Not called for an epoch that goes on. Another number of ranks has no such states.
            loaders.end_epoch()
            self._random.load_state_dict(self._undrawn.state)
            loaders.begin_epoch()
        if self._is_unsaved:
            self._of_epoch = {
                "loop": Replicated(_Taken(_Loop(trainer).state_dict())),
                "callbacks": Replicated(_Taken(_Callbacks(trainer, self).state_dict())),
                "data": _Taken(loaders.state_dict()),
            }
            self._undrawn.state = self._random.state_dict()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random numbers once the loaders have drawn theirs; save an epoch that has ended.

        Before, its validation and its schedules are not done, and the numbers are not drawn.
        """
        if self._drawn is not None:
            self._random.load_state_dict(self._drawn)
            self._drawn = None
        self._save(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the optimizers have stepped and a checkpoint is due."""
        if trainer.global_step == self._last:
            return
        self._last, self._is_unsaved = trainer.global_step, True
        if not trainer.is_last_batch:
            self._undrawn.state = self._random.state_dict()
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._session is None or not self._is_unsaved:
            return
        state = {**self._state, **self._of_ranks, **self._of_epoch}
        self._is_unsaved, self._of_epoch = False, {}
        self._session.save(self._last, state)
        if self._session.is_preempted:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the last step durable."""
        self._undrawn.state = self._random.state_dict()
        self._save(trainer)
        self._close(finishes=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the run after an error."""
        self._close(finishes=False)

    def _close(self, *, finishes: bool) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.close(finishes=finishes)


def _is_between_epochs(trainer: Trainer) -> bool:
    """Return whether all of the last epoch is done, and no batch of another one."""
    progress = trainer.fit_loop.epoch_progress.current
    return bool(progress.started == progress.completed)


class _Taken:
    """A state that was taken before it is saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class _Loop:
    """The progress of the fit loop, the same on all ranks.

    Between two epochs it is that of a fit that has ended and goes on, which Lightning continues
    with a whole epoch. From the last step of an epoch it would leave out the validation, and
    miscount the epochs.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        # At this key are the states of the dataloaders, which differ between ranks.
        state = {k: v for k, v in self._loop.state_dict().items() if k != "state_dict"}
        # A validation that has ended leaves what a restart does not.
        self._begin(state, "epoch_loop.val_loop.batch_progress")
        if _is_between_epochs(self._trainer):
            self._begin(state, "epoch_loop.batch_progress")
            epochs = state["epoch_progress"]
            state["epoch_progress"] = {
                name: {**epochs[name], "ready": epochs[name]["started"]} for name in epochs
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)

    @staticmethod
    def _begin(state: dict[str, Any], name: str) -> None:
        """Set the progress of batches in a state to that before the first one."""
        none = dict.fromkeys(state[name]["current"], 0)
        state[name] = {**state[name], "current": none, "is_last_batch": False}


class _Loaders:
    """The states of the dataloaders of this rank that have one."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop
        self._states: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": self._loop.on_save_checkpoint().get("combined_loader", [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = state["loaders"]
        self._loop.on_load_checkpoint({"combined_loader": self._states})

    def end_epoch(self) -> None:
        """Let the loaders draw the order of the epoch that has ended, so that they draw the next.

        Lightning asks for no batch after the last one: their states are not those of an end.
        """
        loaders: Any = self._loop._combined_loader
        loaders._load_state_dicts(self._states)
        for loader in loaders.flattened:
            if hasattr(loader, "load_state_dict"):
                next(iter(loader), None)

    def begin_epoch(self) -> None:
        """Make the iterators of an epoch anew."""
        iter(self._loop._data_fetcher)


class _Callbacks:
    """The states of the other callbacks, by their keys."""

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._others = {
            each.state_key: each for each in getattr(trainer, "callbacks", ()) if each is not own
        }

    def state_dict(self) -> dict[str, Any]:
        states = {key: each.state_dict() for key, each in self._others.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, of_callback in state.items():
            if key in self._others:
                self._others[key].load_state_dict(of_callback)


class HoldfastCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Stores each of Lightning's checkpoints as a directory like one of `holdfast.save`.

    It is durable and whole when the call returns, and its digests are checked when it is loaded.
    Weights and optimizer states are arrays; everything else is what `torch.save` makes of it.
    """

    def save_checkpoint(
        self,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint in the place of an earlier one at `path`.

        Raises:
            TypeError: there are `storage_options`.
            InvalidArgumentError: something else is at `path`.
            UnsupportedLeafError: a weight or an optimizer state cannot be stored.
            OutOfSpaceError, StorageError: it is not saved.
        """
        if storage_options is not None:
            raise TypeError(f"save to {path}: HoldfastCheckpointIO takes no storage_options")
        others = {name: value for name, value in checkpoint.items() if name not in ARRAYS}
        weights = checkpoint.get("state_dict")
        if weights is not None:
            # The order and the versions of modules, which an `OrderedDict` of PyTorch has.
            others["state_dict"] = list(weights), getattr(weights, "_metadata", None)
        stream = io.BytesIO()
        torch.save(others, stream)
        arrays = {name: checkpoint[name] for name in ARRAYS if name in checkpoint}
        directory = Path(path)
        with translated("save to", directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
        save(directory, {**arrays, OTHERS: _as_tensor(stream)}, overwrite=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, or a file of Lightning's own `TorchCheckpointIO`.

        Args:
            path: the directory or the file.
            map_location: a device for all tensors, or as for `torch.load`; they come from the CPU.
            weights_only: as for `torch.load`.

        Raises:
            FileNotFoundError: there is nothing at `path`.
            NotARunError: `save_checkpoint` has not made what is there.
            CheckpointDamagedError, StorageError: it cannot be read.
        """
        place = Path(path)
        if not place.exists():
            raise FileNotFoundError(f"load {place}: there is no checkpoint")
        if place.is_file():
            content = torch.load(place, map_location=map_location, weights_only=weights_only)
            return dict(content)
        arrays = load(place, framework="torch")
        if OTHERS not in arrays:
            raise NotARunError(
                f"load {place}: expected a checkpoint of HoldfastCheckpointIO, found another; use "
                "holdfast.load"
            )
        others = io.BytesIO(arrays.pop(OTHERS).numpy().tobytes())
        checkpoint = torch.load(others, map_location=map_location, weights_only=weights_only)
        if "state_dict" in checkpoint:
            names, metadata = checkpoint["state_dict"]
            weights = OrderedDict((name, arrays["state_dict"][name]) for name in names)
            if metadata is not None:
                weights._metadata = metadata  # type: ignore[attr-defined]
            arrays["state_dict"] = weights
        if map_location is not None:
            # `torch.load` knows all kinds of locations.
            stream = io.BytesIO()
            torch.save(arrays, stream)
            stream.seek(0)
            arrays = torch.load(stream, map_location=map_location, weights_only=False)
        return {**checkpoint, **arrays}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, or a file of Lightning's own; nothing else.

        Raises:
            InvalidArgumentError: it is another directory.
            StorageError: it cannot be removed.
        """
        place = Path(path)
        if not place.exists():
            return
        with translated("remove", place):
            if place.is_file():
                place.unlink()
                return
            if not is_saved_one(place, SystemClock()):
                raise InvalidArgumentError(
                    f"remove {place}: expected a checkpoint, found another directory; remove it "
                    "yourself"
                )
            # Renamed first, so that no half of it is at the path.
            leaving = place.with_name(f".{place.name}.removed")
            shutil.rmtree(leaving, ignore_errors=True)
            place.rename(leaving)
            shutil.rmtree(leaving)


def _as_tensor(stream: io.BytesIO) -> Any:
    return torch.from_numpy(np.frombuffer(stream.getvalue(), np.uint8).copy())
