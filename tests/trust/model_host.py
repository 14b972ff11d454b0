"""The host of the model: the one in this process, and looks at its folders past Holdfast."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Collection, Hashable
from pathlib import Path

import numpy as np

from holdfast.engine.saving.part_writer import write_part
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.policy.preservation_policy import (
    AnyPreservationPolicy,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
)
from holdfast.store.ram import RamStore
from tests.hosts import expire_leases
from tests.manifests import manifests
from tests.trust.in_process import (
    TICKS_MAX,
    InProcessHost,
    Trainer,
    read_checkpoint,
    right_array,
    right_plan,
)
from tests.trust.model_oracle import Id, Policy

FOLDER = re.compile(r"(\d{9,})\.(\d+)(?:-[0-9a-f]{8})?")
PART = re.compile(r"part-(\d{5})-of-(\d{5})\.json")


def real_policy(policy: Policy) -> PreservationPolicy:
    """Return the policy of Holdfast that corresponds to the oracle's."""
    kind, *arguments = policy
    if kind == "any":
        return AnyPreservationPolicy([real_policy(one) for one in arguments])
    return {"latest": LatestN, "steps": EveryNSteps, "seconds": EveryNSeconds}[kind](*arguments)


RETRY_SECS = 2.5
"""After that what storage refused is tried again."""
SETTLE_COUNT = 8
"""In so many of those a start has given up waiting, and what failed has failed for good."""


class ModelHost(InProcessHost):
    """Adds what only the model does to a host."""

    # The agent.

    def settle(self) -> None:
        """Let the agent notice ended processes, and act until nothing is left to do, even later."""
        for _ in range(SETTLE_COUNT):
            self.clock.sleep(RETRY_SECS)
            self.call(self._act(TICKS_MAX))

    def would_leave(self) -> bool:
        """Lets some time pass, in which the agent acts; whether it has nothing left to stay for."""
        self.clock.sleep(RETRY_SECS / 2)
        self.call(self._act(TICKS_MAX))
        assert self.service is not None
        return self.agent.leaves_in_secs() == 0.0

    def act_once(self) -> None:
        """Lets the agent commit what it would next, to the last byte, and learn nothing of it."""
        before = self.committed_on_disk()
        # One that was wanted by an attempt that is over by now is refused, and others come later.
        for _ in range(SETTLE_COUNT):
            self.clock.sleep(RETRY_SECS)
            while self.call(self._act(TICKS_MAX, until="StorageWorker.commit")):
                assert self.service is not None
                self.agent.storage_worker.threads._committing.submit(int).result()
                if self.committed_on_disk() != before:
                    return

    async def _act(self, ticks: int, until: str = "") -> bool:
        """Act until nothing is left to do, or an operation named `until` has begun.

        Returns:
            Whether that operation has begun.
        """
        assert self.service is not None
        for _ in range(ticks):
            # The loop polls for ended processes on each turn.
            for _ in range(3):
                await asyncio.sleep(0)
            self.agent.tick()
            is_last = until in {operation.__qualname__ for operation in self._operations}
            if not self._begin_operations() and not self.agent.is_busy:
                return False
            if is_last:
                await asyncio.sleep(0)  # The task's first turn hands the thread its work.
                return True
            await self.agent.wait_idle()
        raise AssertionError("the agent does not come to rest")

    def crash_agent(self) -> None:
        """Also where it is busy, of which it then learns no more."""
        if self.service is not None:
            for task in (*self.agent.driver._tasks, *self.agent.retention._preserving):
                task.cancel()
        super().crash_agent()

    def answers(self) -> dict[Id, str]:
        """How saves have ended, as this agent has notified: the checkpoint, and the kind."""
        notices = self.board.posted
        ended = (n for n in notices if n.kind not in ("protected", "preserved"))
        return {named(n.id): n.kind for n in ended if n.id is not None}

    def lose_ram(self) -> None:
        """The power goes: what is on the tmpfs is gone, and leases run out meanwhile."""
        expire_leases(self.run)
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)

    # Trainers.

    def want_slot(self, trainer: Trainer, one: Id, rank: int = 0) -> protocol.Slot:
        """Asks for a slot and does not fill it."""
        assert self.service is not None
        size = right_plan(self.real(*one), rank, trainer.count, self.clock.now()).layout.size_bytes
        request = protocol.WantSlot(rank=rank, id=self.real(*one), size_bytes=size)
        return self.call(self.service.want_slot(request, trainer.process.pid))

    def fill(self, trainer: Trainer, one: Id, rank: int, slot: str) -> None:
        """Fills a slot that the trainer has, whatever the agent thinks of it by now."""
        plan = right_plan(self.real(*one), rank, trainer.count, self.clock.now())
        store = RamStore(self.folder / "ram", lambda size: slot, self.clock, self.files)
        array = right_array(self.real(*one))
        try:
            write_part(store, plan, lambda c: array[c.start[0] : c.stop[0]].view(np.uint8).data)
        finally:
            store.close()

    def tell_again(self, trainer: Trainer, one: Id, rank: int) -> None:
        """Report to a new agent what was reported to the previous one."""
        assert self.service is not None
        request = protocol.Sealed(
            rank=rank,
            id=self.real(*one),
            part_count=trainer.count,
            tier=protocol.PartTier.RAM,
            durable=True,
            again=True,
        )
        self.call(self.service.sealed(request, trainer.process.pid))

    def abandon(self, trainer: Trainer, one: Id, rank: int) -> None:
        """Report that one rank could not make its part."""
        assert self.service is not None
        request = protocol.Abandoned(rank=rank, id=self.real(*one), reason="it could not")
        self.call(self.service.abandoned(request, trainer.process.pid))

    # The contents of the folders, read from their names alone.

    def committed_on_disk(self) -> set[Id]:
        """What has a manifest."""
        found = map(FOLDER.fullmatch, manifests(self.run))
        return {Id(int(match[1]), int(match[2])) for match in found if match}

    def written_on_disk(self) -> set[Id]:
        """What has all its parts and no manifest."""
        found = _folders(self.run / "checkpoints")
        return {one for one in found.keys() - self.committed_on_disk() if _is_whole(found[one])}

    def in_ram(self) -> dict[Id, set[int]]:
        """Return the ranks whose image and part record are in RAM."""
        found = {}
        for one, names in _folders(self.folder / "ram" / "checkpoints").items():
            parts = [match for match in map(PART.fullmatch, names) if match]
            ranks = {
                int(match[1])
                for match in parts
                if f"image-{match[1]}-of-{match[2]}.safetensors" in names
            }
            if ranks:
                found[one] = ranks
        return found

    def unfinished(self, but: Collection[Id] = ()) -> list[str]:
        """What neither is a checkpoint of its tier nor belongs to one, nor to one of `but`."""
        left = []
        for root in (self.run / "checkpoints", self.folder / "ram" / "checkpoints"):
            for folder, _, names in os.walk(root):
                left += [f"{folder}/{name}" for name in names if name.startswith(".")]
        committed = self.committed_on_disk()
        for one, names in _folders(self.run / "checkpoints").items():
            if one not in committed and one not in but:
                left.append(f"durable {one}: {sorted(names)}")
        for one, names in _folders(self.folder / "ram" / "checkpoints").items():
            if not any(PART.fullmatch(name) for name in names):
                left.append(f"ram {one}: {sorted(names)}")
        return left

    def slots_in_use(self) -> int:
        """How many slots have the second name that a sealed image gives them."""
        slots = self.folder / "ram" / "slots"
        found = slots.iterdir() if slots.is_dir() else ()
        return sum(path.stat().st_nlink == 2 for path in found)


def check_offered(
    host: ModelHost, offered: list[Id], read_right: set[Hashable] | None = None
) -> None:
    """The host offers exactly these, and each is itself, bit for bit.

    `read_right` gets checkpoints with all bytes that are stored of them, and these are not read
    again.
    """
    view = host.look()
    assert [named(one) for one in view.timeline] == offered
    read_right = set() if read_right is None else read_right
    for one in view.timeline:
        stored = one, host.stored_bytes(one)
        if stored in read_right:
            continue
        said, array = read_checkpoint(view.sources(one))
        assert said == one
        assert array.tobytes() == right_array(one).tobytes(), f"{one} holds other bits"
        read_right.add(stored)


def _folders(root: Path) -> dict[Id, set[str]]:
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = FOLDER.fullmatch(path.name)
        if match:
            found[Id(int(match[1]), int(match[2]))] = {name.name for name in path.iterdir()}
    return found


def _is_whole(names: set[str]) -> bool:
    parts = [match for match in map(PART.fullmatch, names) if match]
    return bool(parts) and len(parts) == int(parts[0][2])


def named(one: CheckpointId) -> Id:
    """The oracle's name of a checkpoint."""
    return Id(one.step, one.attempt.number)
