"""Lightning: `HoldfastCallback(run)` in the callbacks of a Trainer, for every strategy.

The callback saves after each optimizer step that is due, and `trainer.fit(module)` continues from
the newest checkpoint of the run. Parameters are filled in place, so that strategies that shard them
need nothing more. Dataloaders with a state, as torchdata's `StatefulDataLoader`, continue in the
middle of an epoch; others begin it again, as with Lightning's own checkpoints.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from holdfast.adapt.torch.objects import Replicated
from holdfast.adapt.torch.random_state import RandomState
from holdfast.interop.trainer_session import TrainerSession


class HoldfastCallback(Callback):  # type: ignore[misc]
    """Saves and continues a `fit`; see the module.

    Args:
        run: the run's directory.
        options: arguments of `holdfast.CheckpointManager`.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run, self._options = run, options
        self._session: TrainerSession | None = None
        self._state: dict[str, Any] = {}
        self._of_ranks: dict[str, Any] = {}
        self._last = -1
        self._random = RandomState()
        # The random numbers to set when the loaders have drawn theirs.
        self._drawn: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run, and set all states if it has a checkpoint."""
        self._state = {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loop": Replicated(_Loop(trainer)),
            "callbacks": Replicated(_Callbacks(trainer, self)),
        }
        self._of_ranks = {"rng": self._random, "data": _Loaders(trainer)}
        self._session = TrainerSession(self._run, self._options)
        found = self._session.read("loop")
        if found is not None:
            self._session.resume(found[0], self._state, self._of_ranks)
            self._drawn = self._random.state_dict()
        self._last = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random numbers before an epoch's loader draws some."""
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._set_random()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random numbers once the loader continues in the middle of an epoch."""
        self._set_random()

    def _set_random(self) -> None:
        if self._drawn is not None:
            self._random.load_state_dict(self._drawn)
            self._drawn = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the optimizers have stepped and a checkpoint is due."""
        if trainer.global_step == self._last or self._session is None:
            return
        self._last = trainer.global_step
        self._session.save(self._last, {**self._state, **self._of_ranks})
        if self._session.is_preempted:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the last step durable."""
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


class _Loop:
    """The progress of the fit loop, the same on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        # At this key are the states of the dataloaders, which differ between ranks.
        return {k: v for k, v in self._loop.state_dict().items() if k != "state_dict"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)


class _Loaders:
    """The states of the dataloaders of this rank that have one."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": self._loop.on_save_checkpoint().get("combined_loader", [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.on_load_checkpoint({"combined_loader": state["loaders"]})


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
