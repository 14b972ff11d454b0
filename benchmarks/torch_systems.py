"""The checkpointers of PyTorch that are compared, each set up as its documentation says.

None of Holdfast's peers has a policy: they begin a checkpoint at the first step at which the one
before is done, as Holdfast does continuously, and keep two.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.systems import committed
from benchmarks.torch_states import Guard, TorchState

KEPT = 2
START_SECS = 120
"""How long the process of `torch_checkpointing` may take to start."""
SYNCHRONOUS_INTERVAL_STEPS = 10
"""A save that blocks costs the same at any interval; at every step it would take an hour."""


class TorchSystem(Protocol):
    """One checkpointer, open on one directory."""

    def save(self, step: int, state: TorchState) -> bool:
        """Offers a step, as a training loop does; returns whether it was taken."""
        ...

    def save_now(self, step: int, state: TorchState) -> None:
        """Takes this step."""
        ...

    def guard(self) -> Guard:
        """What the training has to do its update within."""
        ...

    def wait(self) -> None:
        """Waits until all is as durable as the system makes it."""
        ...

    def durable_at(self, step: int) -> float:
        """When the newest checkpoint, of `step`, was as durable as the system makes it.

        It is asked after `wait`; the time is that of `time.time`.
        """
        ...

    def restore(self, into: TorchState) -> None:
        """Loads the newest checkpoint into a state."""
        ...

    def close(self) -> None: ...


class Holdfast:
    """Continuous checkpoints into RAM and onto disk, LatestN(2)."""

    def __init__(self, directory: Path | str) -> None:
        import holdfast
        from holdfast import preservation_policy, save_decision_policy

        self._directory = directory
        self._manager = holdfast.CheckpointManager(
            directory,
            save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(),
            preservation_policy=preservation_policy.LatestN(KEPT),
        )

    def save(self, step: int, state: TorchState) -> bool:
        return self._manager.save(step, state.objects)

    def save_now(self, step: int, state: TorchState) -> None:
        self._manager.save(step, state.objects, force=True)

    def guard(self) -> Guard:
        return contextlib.nullcontext()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def durable_at(self, step: int) -> float:
        # The wait goes on until the checkpoint before the last two is deleted, too.
        return committed("holdfast", Path(self._directory))[step]

    def restore(self, into: TorchState) -> None:
        self._manager.restore(like=into.objects)

    def close(self) -> None:
        self._manager.close()


class Peer:
    """What the others have in common: a path for each step, and two of them kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._saving: Future[Any] | None = None
        self._steps: list[int] = sorted(
            int(path.name) for path in directory.iterdir() if path.name.isdigit()
        )

    def save(self, step: int, state: TorchState) -> bool:
        if self._saving is not None and not self._saving.done():
            return False
        self.save_now(step, state)
        return True

    def save_now(self, step: int, state: TorchState) -> None:
        self.wait()
        while len(self._steps) > KEPT:
            self._remove(self._path(self._steps.pop(0)))
        self._begin(step, state)
        self._steps.append(step)

    def guard(self) -> Guard:
        return contextlib.nullcontext()

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def durable_at(self, step: int) -> float:
        return time.time()

    def close(self) -> None:
        self.wait()

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _newest(self) -> Path:
        return self._path(self._steps[-1])

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path)

    def _begin(self, step: int, state: TorchState) -> None:
        raise NotImplementedError


class TorchSave(Peer):
    """`torch.save` into a file with fsync, which then gets its name; the training waits."""

    def save(self, step: int, state: TorchState) -> bool:
        return step % SYNCHRONOUS_INTERVAL_STEPS == 0 and super().save(step, state)

    def restore(self, into: TorchState) -> None:
        into.load(torch.load(self._newest(), weights_only=True))

    def _remove(self, path: Path) -> None:
        path.unlink()

    def _begin(self, step: int, state: TorchState) -> None:
        path = self._path(step)
        with open(f"{path}.tmp", "wb") as file:
            torch.save(state.state_dicts(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.tmp", path)
        _sync_directory(self._directory)


class Dcp(Peer):
    """`dcp.async_save` with its threads; its writer syncs its files.

    Pinned memory needs CUDA; on the CPU the stager copies into ordinary memory.
    """

    kind = AsyncCheckpointerType.THREAD
    uses_shared_memory = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        can_pin = torch.cuda.is_available()
        options = StagingOptions(can_pin, self.uses_shared_memory, can_pin, can_pin)
        # One for all saves: it keeps the memory that it copies into.
        self._stager = DefaultStager(options)

    def restore(self, into: TorchState) -> None:
        found = into.state_dicts()
        dcp.load(found, checkpoint_id=self._newest())
        into.load(found)

    def close(self) -> None:
        super().close()
        self._stager.close()

    def _begin(self, step: int, state: TorchState) -> None:
        found: Any = dcp.async_save(
            state.state_dicts(),
            storage_writer=dcp.FileSystemWriter(self._path(step)),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        self._saving = getattr(found, "upload_completion", found)


class DcpProcess(Dcp):
    """`dcp.async_save` with its process, which gets the state by shared memory."""

    kind = AsyncCheckpointerType.PROCESS
    uses_shared_memory = True


class TorchCheckpointing(Peer):
    """`torch_checkpointing`, whose staging runs beside the step; updates hold its lock.

    It syncs nothing. Its direct I/O, which is the default, failed on ext4 with EINVAL.
    """

    def __init__(self, directory: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(directory)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(storage_config=storage)
        config.save.process_config.subprocess_init_timeout_secs = START_SECS
        self._manager = CheckpointManager(config)

    def guard(self) -> Guard:
        return self._manager.lock()

    def restore(self, into: TorchState) -> None:
        into.load(dict(self._manager.load(str(self._newest()), into.state_dicts())))

    def close(self) -> None:
        super().close()
        self._manager.close()

    def _begin(self, step: int, state: TorchState) -> None:
        self._saving = self._manager.save(str(self._path(step)), state.state_dicts())


TORCH_SYSTEMS: dict[str, Callable[[Path], TorchSystem]] = {
    "holdfast": Holdfast,
    "torch.save": TorchSave,
    "dcp thread": Dcp,
    "dcp process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing,
}


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
