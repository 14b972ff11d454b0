"""AXLearn: `checkpointer = Checkpointer.default_config()` in a trainer's config.

The checkpointer's `dir` is the run. If AXLearn's own checkpointer has saved there, the training
continues from that, and the run is in the folder `holdfast`; `export` writes a checkpoint for it.
States are AXLearn's own: nested dicts, `VDict`s and optimizer states of tensors, and the input's
iterator. They are saved in one commit, and restored by `TensorSpec`s on the mesh in whose context
`restore` is called.

Invariants:
- `restore` opens no run for writing in a job of one process, so an evaluation may call it beside
  the training. The first `save` opens the run, after the last restored step.
- After the checkpoint of a preemption is durable, `save` ends the process with status 143.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

import holdfast
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StructureMismatchError,
)
from holdfast.policy.codec import BuiltIn
from holdfast.policy.preservation_policy import AnyPreservationPolicy, EveryNSteps, LatestN
from holdfast.policy.save_decision_policy import SpecificStepsPolicy

try:
    import tensorflow as tf
    from axlearn.common.checkpointer import BaseCheckpointer
    from axlearn.common.config import config_class, maybe_instantiate, register_validator
    from axlearn.common.elastic_input import ElasticDatasetIterator
    from axlearn.common.metrics import WeightedSummary
    from axlearn.common.utils import TensorSpec

    from holdfast.interop.trainers import axlearn_files
except ImportError as error:
    raise ImportError(
        "holdfast.interop.trainers.axlearn: expected AXLearn with the interface of its commit "
        "34aed43c (BaseCheckpointer, TensorSpec, ElasticDatasetIterator), found one without it: "
        f"{error}"
    ) from error

PREEMPTED_STATUS = 143
"""The exit status of a process that SIGTERM ends."""
FOLDER = "holdfast"
"""The folder of the run in a directory of AXLearn's own checkpointer."""
_NEVER = 10**15

log = logging.getLogger(__name__)

# AXLearn's configs take values of known types only.
register_validator(match_fn=lambda value: isinstance(value, BuiltIn), validate_fn=lambda _: None)


class MissingStepError(StepNotFoundError, ValueError):
    """There is no checkpoint of a step, as AXLearn's checkpointers report it."""

    __str__ = Exception.__str__


class Checkpointer(BaseCheckpointer):  # type: ignore[misc]
    """Checkpoints of an AXLearn trainer; see the module."""

    @config_class
    class Config(BaseCheckpointer.Config):  # type: ignore[misc]
        """As AXLearn's, with Holdfast's policies and memory.

        Attributes:
            keep_last_n: How many checkpoints stay.
            keep_every_n_steps: If set, one checkpoint every so many steps stays too.
            preservation_policy: Which checkpoints stay, in place of the two above: a policy of
                `holdfast.preservation_policy`, or a config that instantiates to one.
            save_decision_policy: When to save, in place of `save_policy`: a policy of
                `holdfast.save_decision_policy`, or a config that instantiates to one. The last step
                of a training is saved in any case.
            ram: The tier in the host's memory; None disables it.
        """

        keep_last_n: int = 3
        keep_every_n_steps: int | None = None
        preservation_policy: Any = None
        save_decision_policy: Any = None
        ram: holdfast.RamTier | None = holdfast.RamTier()

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        """Return the folders of the checkpoints that are durable, ascending."""
        folders = axlearn_files.committed(base_dir)
        directory = _run_directory(base_dir)
        try:
            with holdfast.open_run(directory) as run:
                for step in run.all_steps():
                    folder = os.path.join(directory, run.metadata(step).folder)
                    # In the memory of this host it has none yet; in a bucket it has none at all.
                    if "://" in folder or os.path.isdir(folder):
                        folders[step] = folder
        except NotARunError:
            pass
        return [folders[step] for step in sorted(folders)]

    @classmethod
    def latest_checkpoint_path(cls, base_dir: str) -> str:
        """Return the folder of the newest checkpoint that is durable.

        Raises:
            IndexError: There is none.
        """
        return cls.checkpoint_paths(base_dir)[-1]

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """Return the steps that can be restored, ascending."""
        steps = set(axlearn_files.committed(base_dir))
        try:
            with holdfast.open_run(_run_directory(base_dir)) as run:
                steps.update(run.all_steps())
        except NotARunError:
            pass
        return sorted(steps)

    def __init__(self, cfg: Config, *, parent: Any) -> None:
        super().__init__(cfg, parent=parent)
        decides = maybe_instantiate(self.config.save_decision_policy)
        self._options: dict[str, Any] = {
            "framework": "jax",
            "ram": self.config.ram,
            "preservation_policy": _preservation(self.config),
            "save_decision_policy": decides or SpecificStepsPolicy([_NEVER]),
        }
        # None: Holdfast's policy decides.
        self._save_policy = self.config.save_policy.instantiate() if decides is None else None
        self._directory = _run_directory(self.config.dir)
        self._manager: holdfast.CheckpointManager | None = None
        self._restored: int | None = None
        self._last: tuple[int, Any, dict[str, float] | None] | None = None

    def save(
        self, *, step: int, state: Any, evaler_summaries: dict[str, Any] | None = None
    ) -> None:
        """Save `state` if the policy decides so, or for a preemption.

        Raises:
            SystemExit: A preemption was announced, and its checkpoint is durable.
            HoldfastError: As `holdfast.CheckpointManager.save`.
        """
        summaries = evaler_summaries or {}
        is_due = self._save_policy is not None and bool(
            self._save_policy(step=step, evaler_summaries=summaries)
        )
        wrapped = _with_readable_iterators(state)
        manager = self._opened(wrapped)
        metrics = _metrics(summaries)
        manager.save(step, wrapped, metrics=metrics, force=is_due)
        self._last = step, wrapped, metrics
        if manager.reached_preemption(step):
            manager.wait_until_finished()
            log.warning("preempted: step %d is saved; the process ends", step)
            raise SystemExit(PREEMPTED_STATUS)

    def restore(self, *, step: int | None = None, state: Any) -> tuple[int | None, Any]:
        """Restore `step`, or the newest checkpoint that can be restored.

        Args:
            step: The step.
            state: `TensorSpec`s or tensors, which give structure, shapes, dtypes and shardings, and
                the iterators, which are set in place.

        Returns:
            The step and the state; None and `state` if there is no checkpoint.

        Raises:
            StructureMismatchError: A `ValueError`: the structure, a shape or a dtype differs.
            MissingStepError: A `ValueError`: there is no checkpoint of `step`.
            InvalidArgumentError: There is no mesh.
        """
        own = axlearn_files.committed(self.config.dir)
        try:
            source = self._source()
            steps = source.all_steps()
        except NotARunError as error:
            others = _files_in(self.config.dir)
            if others:
                raise NotARunError(
                    f"restore: expected a run in {self.config.dir}, or checkpoints of AXLearn's "
                    f"own checkpointer, found other files, such as {others[0]}; choose another dir"
                ) from error
            steps = []
        chosen = max([*steps, *own], default=None) if step is None else step
        if chosen is None:
            log.info("there is no checkpoint in %s", self.config.dir)
            return None, state
        if chosen in own and chosen not in steps:
            self._restored = None
            return chosen, axlearn_files.read(chosen, own[chosen], state)
        if chosen not in steps:
            raise MissingStepError(
                f"restore step {step}: {self.config.dir} has no checkpoint of it"
            )
        like = jax.tree_util.tree_map(_like, _with_readable_iterators(state))
        try:
            # Without a step, an older one is restored if the newest is damaged.
            restored = source.restore(step, like=like)
        except StepNotFoundError as error:
            raise MissingStepError(str(error)) from error
        self._restored = source.last_restore.step
        return self._restored, jax.tree_util.tree_map(_without_wrapper, restored)

    def _source(self) -> Any:
        """Return what reads the run.

        Raises:
            NotARunError: There is none.
        """
        if jax.process_count() > 1 or self._manager is not None:
            # The processes agree on the checkpoint through their managers.
            return self._manager or self._open()
        return holdfast.open_run(self._directory)

    def _open(self) -> holdfast.CheckpointManager:
        self._manager = holdfast.CheckpointManager(self._directory, **self._options)
        return self._manager

    def _opened(self, state: Any) -> holdfast.CheckpointManager:
        """Return the manager, ready to save after the restored step."""
        manager = self._manager or self._open()
        if self._restored is not None:
            step, self._restored = self._restored, None
            sizes = {n: each.size_bytes for n, each in manager.metadata(step).arrays.items()}
            # The state was restored; reading one array of it moves the run to the step.
            manager.resume(state, step=step, only=min(sizes, key=lambda name: sizes[name]))
        return manager

    def wait_until_finished(self) -> None:
        """Wait until all saves are durable.

        Raises:
            SaveFailedError: Some failed.
        """
        if self._manager is not None:
            self._manager.wait_until_finished()

    def stop(self, *, has_exception: bool = False) -> None:
        """Close the run. Without an exception, make the last step durable that was offered.

        With AXLearn's own policy no step is added: that policy decides about the last one too.
        """
        manager, self._manager = self._manager, None
        last, self._last = self._last, None
        if manager is None:
            return
        if has_exception:
            try:
                manager.close()
            except HoldfastError as error:
                # Raising it would hide the error that ended the training.
                log.warning("closing the run failed after another error: %s", error)
            return
        if last is not None and self._save_policy is None:
            step, state, metrics = last
            manager.finish(step, state, metrics=metrics)
        manager.close()


class TfIterator:
    """An iterator of tf.data as an object with a state: the files of a TensorFlow checkpoint."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def get_state(self) -> dict[str, bytes]:
        """Return the files' contents by name."""
        with tempfile.TemporaryDirectory(prefix="holdfast-tf-") as folder:
            tf.train.Checkpoint(self.iterator).write(str(Path(folder) / "iterator"))
            return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}

    def set_state(self, state: dict[str, bytes]) -> None:
        """Set the position of the iterator."""
        with tempfile.TemporaryDirectory(prefix="holdfast-tf-") as folder:
            for name, content in state.items():
                (Path(folder) / name).write_bytes(content)
            tf.train.Checkpoint(self.iterator).read(str(Path(folder) / "iterator"))


class ElasticIterator:
    """AXLearn's `ElasticDatasetIterator` as an object with a state.

    It has the position in the data of this process and, while slices are missing, in that of the
    processes that are gone, which those that are left read in their place. Processes are numbered
    from 0, and the missing ones are the last.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def get_state(self) -> dict[str, Any]:
        """Return the positions, and for which processes the second one is."""
        elastic = self.iterator.elastic_iterator
        return {
            "primary": _readable(self.iterator.primary_iterator).get_state(),
            "elastic": None if elastic is None else _readable(elastic).get_state(),
            "elastic_process_ids": list(self.iterator.elastic_process_ids or []),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the positions that this process has saved, with as many processes."""
        _readable(self.iterator.primary_iterator).set_state(state["primary"])
        if self.iterator.elastic_iterator is not None:
            _readable(self.iterator.elastic_iterator).set_state(state["elastic"])

    def set_states(self, states: Sequence[Mapping[str, Any]], *, rank: int, count: int) -> None:
        """Set the positions from those of another number of processes.

        Raises:
            StructureMismatchError: None of them has the position in the data of a process.
        """
        primary = _readable(self.iterator.primary_iterator)
        primary.set_state(_position(states, rank))
        if self.iterator.elastic_iterator is not None:
            elastic = _readable(self.iterator.elastic_iterator)
            elastic.set_state(_position(states, self.iterator.elastic_process_ids[0]))


def _position(states: Sequence[Mapping[str, Any]], process: int) -> Any:
    """Return the position in the data of a process, which another one may have read for it."""
    if process < len(states):
        return states[process]["primary"]
    for state in states:
        if state["elastic"] is not None and process in state["elastic_process_ids"]:
            return state["elastic"]
    raise StructureMismatchError(
        f"restore the input's iterator: expected the position of process {process}, found those of "
        f"{len(states)} processes, none of which has read its data; set save_input_iterator=False"
    )


def _with_readable_iterators(state: Any) -> Any:
    return jax.tree_util.tree_map(_readable, state)


def _readable(leaf: Any) -> Any:
    if isinstance(leaf, ElasticDatasetIterator):
        return ElasticIterator(leaf)
    return TfIterator(leaf) if isinstance(leaf, tf.data.Iterator) else leaf


def _without_wrapper(leaf: Any) -> Any:
    return leaf.iterator if isinstance(leaf, TfIterator | ElasticIterator) else leaf


def export(
    directory: str, target: str | os.PathLike[str], *, state: Any, step: int | None = None
) -> Path:
    """Write a checkpoint as AXLearn's own checkpointer does, which continues from it.

    Called in the context of a mesh, as `restore`, by all processes of a job.

    Args:
        directory: The `dir` of a checkpointer of this module.
        target: The `dir` of one of AXLearn's.
        state: `TensorSpec`s and iterators, as the trainer restores them.
        step: The step; None: the newest one.

    Returns:
        The folder of the step.

    Raises:
        StepNotFoundError: There is no such checkpoint.
        InvalidArgumentError: `target` has one of the step, or AXLearn cannot write the state.
        HoldfastError: As `Checkpointer.restore`.
    """
    config = Checkpointer.default_config().set(name="export", dir=directory)
    checkpointer = config.instantiate(parent=None)
    try:
        found, restored = checkpointer.restore(step=step, state=state)
    finally:
        checkpointer.stop(has_exception=True)
    if found is None:
        raise MissingStepError(f"export {directory}: there is no checkpoint")
    return axlearn_files.write(found, target, restored)


def _run_directory(directory: str) -> str:
    """Return where the run of a checkpointer's `dir` is."""
    if "://" in directory or not axlearn_files.step_folders(directory):
        return directory
    try:
        holdfast.open_run(directory).close()
    except NotARunError:
        return os.path.join(directory, FOLDER)
    return directory


def _like(leaf: Any) -> Any:
    """Return an array's shape, dtype and sharding; other leaves as they are."""
    if not isinstance(leaf, TensorSpec):
        return leaf
    message = "restore: expected the context of a mesh with the axes of the TensorSpecs, found "
    try:
        sharding = leaf.sharding
    except ValueError as error:
        raise InvalidArgumentError(f"{message}{error}") from error
    if sharding.mesh.empty:
        raise InvalidArgumentError(f"{message}none")
    # Memory kinds are for the compiled step, which moves what it needs elsewhere.
    placed = jax.sharding.NamedSharding(sharding.mesh, sharding.spec)
    dtype = np.dtype(getattr(leaf.dtype, "dtype", leaf.dtype))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, sharding=placed)  # type: ignore[no-untyped-call]


def _files_in(directory: str) -> list[str]:
    """Return the names in a directory but those of AXLearn's steps; none of one that is missing."""
    if "://" in directory or not os.path.isdir(directory):
        return []
    own = {os.path.basename(folder) for folder in axlearn_files.step_folders(directory).values()}
    return sorted(set(os.listdir(directory)) - own - {FOLDER})


def _metrics(summaries: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the scalars of the evalers' summaries as `evaler/metric`."""
    scalars: dict[str, float] = {}
    for evaler, metrics in summaries.items():
        for name, value in (metrics or {}).items():
            scalar = value.mean if isinstance(value, WeightedSummary) else value
            if np.ndim(scalar) == 0 and not isinstance(scalar, str | bool | None):
                scalars[f"{evaler}/{name}"] = float(scalar)
    return scalars or None


def _preservation(config: Any) -> Any:
    own = maybe_instantiate(config.preservation_policy)
    if own is not None:
        return own
    if type(config.keep_last_n) is not int or config.keep_last_n < 1:
        _refuse("keep_last_n", config.keep_last_n)
    if config.keep_every_n_steps is None:
        return LatestN(config.keep_last_n)
    if type(config.keep_every_n_steps) is not int or config.keep_every_n_steps < 1:
        _refuse("keep_every_n_steps", config.keep_every_n_steps)
    return AnyPreservationPolicy(
        [LatestN(config.keep_last_n), EveryNSteps(config.keep_every_n_steps)]
    )


def _refuse(name: str, found: object) -> NoReturn:
    raise InvalidArgumentError(f"{name}: expected an int of 1 or more, found {found!r}")
