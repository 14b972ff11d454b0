"""torchtitan: `checkpoint=HoldfastCheckpointManager.Config(enable=True)` in a trainer's config.

The folder of the config, below the trainer's dump folder, is the run. Every step is offered to the
policies: `interval=0` saves continuously, and any other number after as many steps. The trainer's
own wait for staging before each optimizer step is not needed, and returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    BaseCheckpointManager,
    ModelWrapper,
)

from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import InvalidArgumentError
from holdfast.interop.trainers.trainer_session import TrainerSession
from holdfast.torch import RandomState, Replicated

_NOT_OFFERED = {
    "initial_load_path": "initial_load_path",
    "last_save_in_hf": "last_save_in_hf; run `holdfast export` when the training has ended",
    "create_seed_checkpoint": "create_seed_checkpoint",
}


class HoldfastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Checkpoints of a torchtitan trainer; see the module.

    The last checkpoint is a whole one, whatever `last_save_model_only` is.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's, where `interval=0` saves continuously."""

        def __post_init__(self) -> None:
            """Check the settings.

            Raises:
                InvalidArgumentError: Holdfast does not have one of them.
            """
            for name, shown in _NOT_OFFERED.items():
                if getattr(self, name):
                    raise InvalidArgumentError(
                        f"checkpoint.{name}: expected it to be off with Holdfast, found {shown}"
                    )
            settings: Any = self
            interval = settings.interval
            # torchtitan's own check refuses 0.
            settings.interval = interval or 1
            BaseCheckpointManager.Config.__post_init__(self)
            settings.interval = interval

    def __init__(self, config: Config, **parts: Any) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        self._config = config
        self._session: TrainerSession | None = None
        self._run = Path(parts["base_folder"]) / config.folder
        self._state: dict[str, Any] = {
            MODEL: Replicated(ModelWrapper(parts["model_parts"])),
            OPTIMIZER: Replicated(parts["optimizers"]),
            LR_SCHEDULER: Replicated(parts["lr_schedulers"]),
        }
        self._state |= {name: Replicated(of) for name, of in parts["states"].items()}
        self._of_ranks: dict[str, Any] = {"rng": RandomState()}
        if parts["dataloader"] is not None:
            self._of_ranks[DATALOADER] = parts["dataloader"]

    def __del__(self) -> None:
        """Close the run if the trainer did not."""
        self.close()

    def _opened(self) -> TrainerSession:
        if self._session is None:
            every, keep = self._config.interval, self._config.keep_latest_k
            options: dict[str, Any] = {
                "preservation_policy": preservation_policy.LatestN(keep or None),
            }
            if every:
                policy = save_decision_policy.FixedIntervalPolicy(every)
                options["save_decision_policy"] = policy
            self._session = TrainerSession(self._run, options)
        return self._session

    def _load(self, step: int = -1) -> bool:
        session = self._opened()
        if step < 0:
            # Of all that is saved this is small, and read to find the newest good checkpoint.
            newest = session.read(TRAIN_STATE)
            if newest is None:
                return False
            step, _ = newest
        every = [*self._state, *self._of_ranks]
        names = [name for name in every if name not in self._config.exclude_from_loading]
        session.resume(step, self._state, self._of_ranks, only=names)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only:
            return False
        state = {**self._state, **self._of_ranks}
        if last_step:
            return self._opened().finish(curr_step, state)
        is_first = curr_step == 1 and self._config.enable_first_step_checkpoint
        return self._opened().save(curr_step, state, force=is_first)

    def _wait_for_saving(self) -> None:
        """Do nothing: no future is ever set."""

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the state is fixed when `save` returns."""

    def _close(self) -> None:
        session, self._session = getattr(self, "_session", None), None
        if session is not None:
            session.close(finishes=False)
