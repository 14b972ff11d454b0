"""Run one host's agent and trainer in this process: the real stores and sequences, step by step.

There is no socket and no heartbeat: a trainer calls the agent's service as the server's routes do,
and `settle` lets the agent act as it would on its own. A crash is an agent that is not called any
more; a trainer that dies is a process that is killed. Time does not pass unless it is moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import astuple

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.view import View, view_of
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import write_part
from holdfast.errors import ObjectNotFoundError
from holdfast.format.grid import RestoreTarget
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, Container, PartRecord, SavedValue
from holdfast.host.agent import Agent
from holdfast.host.driver.agent_run import AgentRun, open_run
from holdfast.host.driver.attached_trainers import NoticeBoard
from holdfast.host.metering.meters import Metering
from holdfast.host.service import Service
from holdfast.host.wire import protocol
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.protocol import PartTier
from holdfast.policy import preservation_evaluation
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.ram import RamStore
from tests.engine.reusing import images_reusing, link_images

RUN_ID = "0123456789abcdef0123456789abcdef"
TICKS_MAX = 1000
POLL_SECS = 0.02
STARTING = ("StorageWorker.list_durable", "StorageWorker.begin")
ARRAY_SIZE = 700

T = TypeVar("T")


@dataclass
class StepClock:
    """A clock that moves only on request, and tokens in a fixed order."""

    secs: float = 1000.0
    tokens: int = 0

    def now(self) -> datetime:
        return datetime(2026, 8, 1, 12, tzinfo=UTC) + timedelta(seconds=self.secs)

    def monotonic(self) -> float:
        return self.secs

    def sleep(self, secs: float) -> None:
        self.secs += secs

    def new_token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:032x}"


def right_array(checkpoint: CheckpointId) -> np.ndarray:
    """What the array of a checkpoint holds: other bits for every step of every attempt."""
    attempt = checkpoint.attempt
    seed = (checkpoint.step, attempt.number, int(attempt.token, 16))
    return np.random.default_rng(seed).integers(0, 2**32, ARRAY_SIZE, np.uint32)


def right_base(attempt: AttemptId) -> np.ndarray:
    """What the array that never changes holds, where there is one."""
    return right_array(CheckpointId(0, AttemptId(1_000_000 + attempt.number, attempt.token)))


def right_plan(
    checkpoint: CheckpointId, rank: int, count: int, time: datetime, *, has_base: bool = False
) -> PartPlan:
    """One rank's part: half of the array each, where there are two."""
    chunk = -(-ARRAY_SIZE // count)
    spec = CheckpointSpec(
        time=time,
        metrics=None,
        arrays=tuple(
            ArraySpec(
                path=(name,),
                shape=(ARRAY_SIZE,),
                dtype="uint32",
                chunk_shape=(chunk,),
                owners=tuple((r, 1) for r in range(count)),
            )
            for name in (("w", "base") if has_base else ("w",))
        ),
        containers=(Container(path=(), kind="dict"),),
        values=(SavedValue(path=("id",), value=[checkpoint.step, *astuple(checkpoint.attempt)]),),
        process_values=(),
    )
    return PartPlan(
        run_id=RUN_ID,
        id=checkpoint,
        rank=rank,
        part_count=count,
        layout=image_layout(spec.arrays, rank),
        spec=spec,
        process_values=(),
    )


def read_checkpoint(sources: CheckpointSources) -> tuple[CheckpointId, np.ndarray]:
    """Return a checkpoint's recorded owner and its array; digests are checked."""
    step, number, token = sources.spec.values[0].value
    attempt = AttemptId(number, token)
    found = [np.zeros(ARRAY_SIZE, np.uint32) for _ in sources.spec.arrays]
    region = ((0,), (ARRAY_SIZE,))
    fill_targets(
        sources,
        [RestoreTarget(array_index=i, region=region, buffer=b) for i, b in enumerate(found)],
    )
    for base in found[1:]:
        assert base.tobytes() == right_base(attempt).tobytes(), "the base holds other bits"
    return CheckpointId(step, attempt), found[0]


@dataclass
class Trainer:
    """One group's only rank, or all of its ranks: `process` is what the agent sees live and die."""

    group: str
    count: int
    process: subprocess.Popen[bytes]
    place: protocol.Attached
    stores: list[RamStore] = field(default_factory=list)

    @property
    def attempt(self) -> AttemptId:
        return self.place.attempt


class RecordingBoard(NoticeBoard):
    """A board that also calls a function with each notice at the moment of posting."""

    def __init__(self, tell: Callable[[protocol.Notice], None]) -> None:
        super().__init__()
        self._tell = tell
        self.posted: list[protocol.Notice] = []

    def post(self, notice: protocol.Notice) -> None:
        self.posted.append(notice)
        self._tell(notice)
        super().post(notice)


class InProcessHost:
    """A run and its host; `files` may record or refuse what the stores do."""

    def __init__(
        self,
        root: Path,
        files: FileSystem = LOCAL,
        clock: Clock | None = None,
        preserve: PreservationPolicy | None = None,
        *,
        run: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.run = run or root / "run"
        self.folder = folder or root / "agent"
        self.files = files
        self.clock = clock or StepClock()
        self.preserve = preserve or LatestN(2)
        self.ram_preserve: PreservationPolicy = LatestN(1)
        self.runner = asyncio.Runner()
        self.service: Service | None = None
        self.trainers: list[Trainer] = []
        self.remote_request: protocol.RemoteRequest | None = None
        self.keeps = False
        """Whether there is an array that never changes, and that is not written again."""
        self._last: dict[tuple[str, AttemptId, int], PartRecord] = {}
        self._operations: list[Coroutine[Any, Any, Any]] = []
        """What the agent wants done in the stores, and does when it is given its turn."""
        self._groups = 0
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs one call of the service to its end."""
        return self.runner.run(coroutine)

    # The agent.

    def start_agent(self) -> None:
        """Starts an agent, which adopts what the one before it left."""
        self.open_run()
        config = AgentConfig(
            run=str(self.run), run_id=RUN_ID, host="host-a", folder=str(self.folder)
        )
        metering = Metering(self.clock)
        run = self.opened_run(config, metering)
        self.board = RecordingBoard(self.posted)
        self.agent = Agent(run, metering, self.board)
        self.service = Service(self.agent)
        self._operations.clear()
        self._start_operation = self.agent.driver._start
        self.agent.driver._start = self._operations.append
        self.call(self.agent.adopt())

    def opened_run(self, config: AgentConfig, metering: Metering) -> AgentRun:
        """The agent's run; for subclasses with another durable tier."""
        return open_run(config, self.clock, self.files, metering.note_event)

    def open_run(self) -> None:
        """Makes the run where there is none, as the first trainer does."""
        self.run.mkdir(parents=True, exist_ok=True)
        durable = DiskStore(self.run, self.clock, self.files)
        create_run(durable, str(self.run), RUN_ID, self.clock.now())

    def posted(self, notice: protocol.Notice) -> None:
        """Take a notice of the agent to its trainers at the moment of posting; for subclasses."""

    def crash_agent(self) -> None:
        """The agent is asked nothing more; its threads end, and nothing is cleaned up."""
        if self.service is not None:
            for operation in self._operations:
                operation.close()
            self.call(_close(self.agent))
            self.service = None
            # Each agent has a loop of its own, as it has a process.
            self.runner.close()
            self.runner = asyncio.Runner()

    def settle(self) -> None:
        """Lets the agent act until it has nothing to do."""
        self.call(self._settle())

    async def _settle(self) -> None:
        assert self.service is not None
        for _ in range(TICKS_MAX):
            self.agent.tick()
            if not self._begin_operations() and not self.agent.is_busy:
                return
            await self.agent.wait_idle()
        raise AssertionError("the agent does not come to rest")

    def _begin_operations(self, names: Collection[str] | None = None) -> bool:
        """Lets the agent begin what it wants done in the stores; whether there was anything."""
        wanted = [d for d in self._operations if names is None or d.__qualname__ in names]
        for operation in wanted:
            self._operations.remove(operation)
            self._start_operation(operation)
        return bool(wanted)

    def call_and_wait(self, *coroutines: Coroutine[Any, Any, T]) -> list[T]:
        """Calls that wait until an attempt has begun; nothing else is done meanwhile."""
        return self.call(self._call_and_wait(coroutines))

    async def _call_and_wait(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        assert self.service is not None
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        for _ in range(TICKS_MAX):
            for _ in range(3):
                await asyncio.sleep(0)
            if all(task.done() for task in tasks):
                return await asyncio.gather(*tasks)
            if self._begin_operations(STARTING) or self.agent.is_busy:
                await self.agent.wait_idle()
            else:
                # They may wait in another thread, or for time to pass.
                await asyncio.sleep(0.001)
                self.clock.sleep(max(0.0, min(self.agent.driver.next_in_secs(), 0.1)))
                self.agent.driver.tick()
        raise AssertionError("a call does not come to its end")

    # Trainers.

    def attach(self, count: int = 1, *, takeover: bool = False) -> Trainer:
        """A new group of trainers, all of its ranks in one process."""
        self._groups += 1
        process = self.start_process()
        trainer = Trainer(f"group-{self._groups}", count, process, None)  # type: ignore[arg-type]
        self.trainers.append(trainer)
        self.join(trainer, takeover=takeover)
        return trainer

    def start_process(self) -> subprocess.Popen[bytes]:
        """What the agent takes for the trainer's process."""
        return subprocess.Popen(["sleep", "1000"])

    def join(
        self, trainer: Trainer, *, takeover: bool = False, attempt: AttemptId | None = None
    ) -> None:
        """Attaches each rank; `attempt` where it had a place with an agent that is gone."""
        assert self.service is not None
        durable = protocol.TierPolicies(
            save=None, preserve=preservation_evaluation.encode(self.preserve).decode()
        )
        ram = protocol.TierPolicies(
            save=None, preserve=preservation_evaluation.encode(self.ram_preserve).decode()
        )
        requests = [
            protocol.Attach(
                group=trainer.group,
                rank=rank,
                count=trainer.count,
                attempt=attempt,
                takeover=takeover,
                durable=durable,
                ram=ram,
                ram_limit_bytes=None,
                linger_secs=600.0,
                remote=self.remote_request,
            )
            for rank in range(trainer.count)
        ]
        pid = trainer.process.pid
        trainer.place = self.call_and_wait(*(self.service.attach(r, pid) for r in requests))[-1]

    def save(self, trainer: Trainer, step: int, *, durable: bool = True) -> CheckpointId:
        """Seal every rank's part of `step` in RAM, and report it to the agent."""
        checkpoint = CheckpointId(step, trainer.attempt)
        for rank in range(trainer.count):
            self.seal(trainer, checkpoint, rank)
            self.tell_sealed(trainer, checkpoint, rank, durable=durable)
        return checkpoint

    def seal(self, trainer: Trainer, checkpoint: CheckpointId, rank: int = 0) -> None:
        """Writes one rank's part into a slot."""
        assert self.service is not None
        name = ""
        store = RamStore(self.agent.ram.store.root, lambda size: name, self.clock, self.files)
        with contextlib.closing(store):
            plan, images = self.begin_part(store, trainer, checkpoint, rank)
            request = protocol.WantSlot(
                rank=rank,
                id=checkpoint,
                size_bytes=images.own.size_bytes,
            )
            slot = self.call(self.service.want_slot(request, trainer.process.pid))
            assert slot.name is not None, slot.reason
            name = slot.name
            self.write_part(store, plan, images)

    def begin_part(
        self, store: Store, trainer: Trainer, checkpoint: CheckpointId, rank: int
    ) -> tuple[PartPlan, PartImages]:
        """What one rank's part consists of; what it keeps is linked."""
        plan = right_plan(checkpoint, rank, trainer.count, self.clock.now(), has_base=self.keeps)
        last = self._last.get((store.tier, checkpoint.attempt, rank))
        if last is None or last.part_count != trainer.count:
            return plan, PartImages(own=plan.layout)
        base = {chunk.ordinal for chunk in plan.layout.chunks if chunk.array_index == 1}
        images = images_reusing(plan, last, base)
        try:
            link_images(store, plan, last, images)
        except ObjectNotFoundError:
            return plan, PartImages(own=plan.layout)
        return plan, images

    def write_part(self, store: Store, plan: PartPlan, images: PartImages) -> None:
        """Writes one rank's part."""
        arrays = right_array(plan.id), right_base(plan.id.attempt)

        def chunk_bytes(chunk: Chunk) -> memoryview:
            return arrays[chunk.array_index][chunk.start[0] : chunk.stop[0]].view(np.uint8).data

        record = write_part(store, plan, chunk_bytes, images)
        if self.keeps:
            self._last[store.tier, plan.id.attempt, plan.rank] = record

    def tell_sealed(
        self,
        trainer: Trainer,
        checkpoint: CheckpointId,
        rank: int = 0,
        *,
        durable: bool = True,
        tier: PartTier = PartTier.RAM,
    ) -> None:
        """Report to the agent that one rank's part is whole."""
        assert self.service is not None
        request = protocol.Sealed(
            rank=rank,
            id=checkpoint,
            part_count=trainer.count,
            tier=tier,
            durable=durable,
        )
        self.call(self.service.sealed(request, trainer.process.pid))

    def branch(self, trainer: Trainer, origin: CheckpointId | None) -> None:
        """Goes back to `origin`: every rank asks for a new attempt."""
        assert self.service is not None
        before = trainer.attempt
        for rank in range(trainer.count):
            request = protocol.Branch(group=trainer.group, rank=rank, attempt=before, origin=origin)
            (trainer.place,) = self.call_and_wait(self.service.branch(request, trainer.process.pid))

    def detach(self, trainer: Trainer) -> None:
        """Every rank leaves in good order."""
        assert self.service is not None
        for rank in range(trainer.count):
            request = protocol.Detach(group=trainer.group, rank=rank)
            self.call(self.service.detach(request, trainer.process.pid))
        self._end(trainer)

    def kill_trainer(self, trainer: Trainer) -> None:
        """SIGKILL; the agent sees it when it next acts."""
        self._end(trainer)

    def delete(self, step: int) -> None:
        """As `CheckpointManager.delete`."""
        assert self.service is not None
        found = self.look().find(step)
        request = protocol.Delete(ids=(found,))
        pid = self.trainers[-1].process.pid if self.trainers else 0
        self.call(self._while_it_acts(self.service.delete(request, pid)))

    async def _while_it_acts(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Make a call that waits for the agent's own actions; time does not pass."""
        task = asyncio.create_task(coroutine)
        for _ in range(TICKS_MAX):
            done, _ = await asyncio.wait({task}, timeout=POLL_SECS)
            if done:
                break
            self._begin_operations()
        return await task

    # What a person or a trainer sees.

    def real(self, step: int, number: int) -> CheckpointId:
        """The checkpoint of a step in the run's attempt with that number."""
        return CheckpointId(step, read_attempt(DiskStore(self.run, self.clock), number).attempt)

    def stores(self) -> tuple[Store, Store]:
        """The tiers as a reader opens them."""

        def reads_only(size_bytes: int) -> str:
            raise AssertionError(f"a reader reserves {size_bytes} bytes")

        ram = RamStore(self.folder / "ram", reads_only, self.clock, self.files)
        return ram, DiskStore(self.run, self.clock, self.files)

    def look(self) -> View:
        """What can be read now, from every tier."""
        ram, durable = self.stores()
        return view_of((ram, durable), durable)

    def stored_bytes(self, one: CheckpointId) -> Hashable:
        """All files of a checkpoint in RAM and on the disk, and all images there: it may name some
        of earlier checkpoints.
        """
        found = {
            (tier, path.relative_to(root), path.read_bytes())
            for tier, root in (("ram", self.folder / "ram"), ("disk", self.run))
            for names in (f"checkpoints/{one}/*", "checkpoints/*/image*")
            for path in root.glob(names)
        }
        return frozenset(found)

    def close(self) -> None:
        """Ends all that was started."""
        for trainer in self.trainers:
            self._end(trainer)
        self.crash_agent()
        self.runner.close()

    def _end(self, trainer: Trainer) -> None:
        trainer.process.kill()
        trainer.process.wait()


async def _close(agent: Agent) -> None:
    agent.close()


@contextlib.contextmanager
def in_process_host(root: Path, **options: Any) -> Iterator[InProcessHost]:
    """A host that is ended on leaving."""
    made = InProcessHost(root, **options)
    try:
        yield made
    finally:
        made.close()
