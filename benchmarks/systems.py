"""The systems that are compared, each behind the same few calls, each set up as its docs say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax

State = dict[str, Any]


class System(Protocol):
    """One checkpointer, open on one directory."""

    def resume(self, state: State) -> State:
        """What a training loop begins with: the newest checkpoint's state, else `state`."""
        ...

    def save(self, step: int, state: State) -> bool:
        """Offers a step, as a training loop does; the system's policy decides."""
        ...

    def save_now(self, step: int, state: State) -> None:
        """Takes this step, whatever the policy."""
        ...

    def wait(self) -> None:
        """Waits until all is as durable as the system makes it."""
        ...

    def sealed_at(self, step: int) -> float:
        """Waits until a crash of the process does not lose `step`; returns when that was."""
        ...

    def restore(self, like: State) -> State:
        """The newest checkpoint; `like` are ShapeDtypeStructs with shardings."""
        ...

    def close(self) -> None: ...


def abstract(state: State) -> State:
    """What a restore is given: shapes, dtypes and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


class Holdfast:
    """Continuous checkpoints into RAM and onto disk, LatestN(2)."""

    def __init__(self, directory: Path, **policy: Any) -> None:
        import holdfast
        from holdfast import preservation_policy, save_decision_policy

        self._directory = directory
        self.manager = holdfast.CheckpointManager(
            directory,
            save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(**policy),
            preservation_policy=preservation_policy.LatestN(2),
        )

    def resume(self, state: State) -> State:
        _, found = self.manager.resume(state)
        return found

    def save(self, step: int, state: State) -> bool:
        return self.manager.save(step, state)

    def save_now(self, step: int, state: State) -> None:
        self.manager.save(step, state, force=True)

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def sealed_at(self, step: int) -> float:
        return _wait_for(lambda: _sealed_time(self._directory, step))

    def restore(self, like: State) -> State:
        restored: State = self.manager.restore(like=like)
        return restored

    def close(self) -> None:
        self.manager.close()


class Orbax:
    """Asynchronous, ContinuousCheckpointingPolicy, LatestN(2), as its documentation recommends."""

    def __init__(self, directory: Path, **policy: Any) -> None:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers

        self._args = ocp.args
        self.manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=checkpoint_managers.ContinuousCheckpointingPolicy(**policy),
                preservation_policy=checkpoint_managers.LatestN(2),
                enable_async_checkpointing=True,
            ),
        )

    def resume(self, state: State) -> State:
        return state if self.manager.latest_step() is None else self.restore(abstract(state))

    def save(self, step: int, state: State) -> bool:
        return bool(self.manager.save(step, args=self._args.StandardSave(state)))

    def save_now(self, step: int, state: State) -> None:
        self.manager.save(step, args=self._args.StandardSave(state), force=True)

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def sealed_at(self, step: int) -> float:
        # It has no memory that outlives the process: a checkpoint is safe when it is finished.
        self.manager.wait_until_finished()
        return time.time()

    def restore(self, like: State) -> State:
        step = self.manager.latest_step()
        restored: State = self.manager.restore(step, args=self._args.StandardRestore(like))
        return restored

    def close(self) -> None:
        self.manager.close()


SYSTEMS: dict[str, Callable[..., System]] = {"holdfast": Holdfast, "orbax": Orbax}


def committed(system: str, directory: Path) -> dict[int, float]:
    """The steps that are finished, and when each got the name that says so, by `time.time`."""
    if system == "orbax":
        folders = (path for path in directory.glob("*") if path.name.isdigit())
        named = {int(path.name): path for path in folders}
    else:
        from holdfast.format.names import MANIFESTS, parse_manifest_key

        listed = [*(directory / MANIFESTS).glob("*")]
        keys = [parse_manifest_key(f"{MANIFESTS}/{path.name}") for path in listed]
        named = {key.step: path for key, path in zip(keys, listed, strict=True) if key is not None}
    times = {}
    for step, path in named.items():
        # It may be removed just now.
        with contextlib.suppress(FileNotFoundError):
            times[step] = path.stat().st_ctime
    return times


def _sealed_time(directory: Path, step: int) -> float | None:
    from holdfast.observe.events.reader import read_events
    from holdfast.observe.events.schema import CheckpointSealed

    found = (event for event in read_events(directory, CheckpointSealed) if event.step == step)
    return next((event.time.timestamp() for event in found), None)


def _wait_for(look: Callable[[], float | None], secs: float = 120.0) -> float:
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.01)
    raise TimeoutError(f"not seen in {secs} s")
