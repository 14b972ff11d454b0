"""Compare what this rank holds of other ranks' parts with what they have saved.

The digests are of the state that is being saved, and are compared with those in the other ranks'
part records once the checkpoint is committed, or is in the RAM of all hosts that save it. No rank
waits for another one.

Invariants:
- A check neither delays nor fails a save. A record that cannot be read is not compared.
- At most `PENDING_MAX` checkpoints wait for their end; older ones are forgotten.
- This rank's replicas were equal to the others' up to `equal_until`: each window was compared, and
  was equal, at that step or later. A bit that flips stays flipped.

See docs/decisions/0063.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.adapt.contract import Snapshot
from holdfast.engine.planning.replica_blocks import ReplicaBlock, ReplicaWindow
from holdfast.errors import CheckpointDamagedError, HoldfastError, StorageError
from holdfast.format.digests import digest
from holdfast.format.names import CheckpointId, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import unseal
from holdfast.observe.events.schema import SHOWN_MAX, ReplicasDiffer
from holdfast.store.contract import ReadableStore, Store

PENDING_MAX = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The digests of this rank's copies of some blocks of a checkpoint."""

    id: CheckpointId
    part_count: int
    window: ReplicaWindow
    digests: Sequence[str]


def digests_of(snapshot: Snapshot, blocks: Sequence[ReplicaBlock]) -> list[str]:
    """Return the digest of each block of a state, which is not released yet.

    Raises:
        DeviceError: A device failed.
    """
    digests, last, data = [], None, memoryview(b"")
    for block in blocks:
        if block.chunk is not last:
            last, data = block.chunk, snapshot.chunk_bytes(block.chunk)
        digests.append(digest(data[block.start : block.stop]))
    return digests


class _Start:
    """What was compared since the training began or was restored at a step."""

    def __init__(self, step: int) -> None:
        self.equal_until = self._step = step
        self.differs_at: int | None = None
        self._equal_at: dict[int, int] = {}
        """For each window the last step at which it was equal."""

    def note(self, step: int, window: ReplicaWindow, *, is_equal: bool) -> None:
        """Note the result of one window."""
        if not is_equal:
            self.differs_at = step if self.differs_at is None else self.differs_at
            return
        self._equal_at[window.number] = step
        of_turn = [self._equal_at.get(number, self._step) for number in window.numbers]
        self.equal_until = min(of_turn, default=step)


class ReplicaChecks:
    """The checks of one rank.

    `expect` and `compare` are called on the saver's thread, the others on any thread.

    Args:
        rank: This rank.
        durable: The durable tier, which has the part records of all ranks.
        ram_of: Returns the RAM of a rank's host; None: it cannot be read.
        report: Reports an event.
        fail: Raises an error in the training; None: differences are warnings.
    """

    def __init__(
        self,
        rank: int,
        durable: Store,
        ram_of: Callable[[int], ReadableStore | None],
        report: Callable[[ReplicasDiffer], None],
        fail: Callable[[HoldfastError], None] | None,
    ) -> None:
        self._rank, self._durable, self._ram_of = rank, durable, ram_of
        self._report, self._fail = report, fail
        self._pending: dict[CheckpointId, BlockDigests] = {}
        self._ended: deque[tuple[CheckpointId, bool]] = deque(maxlen=PENDING_MAX)
        self._lock = threading.Lock()
        self._start = _Start(-1)
        self.last_error: HoldfastError | None = None
        """What was found last."""

    @property
    def differs_at(self) -> int | None:
        """The first step at which a replica was found to differ; None: none was."""
        return self._start.differs_at

    @property
    def equal_until(self) -> int:
        """The step up to which this rank's replicas were equal to the others'."""
        return self._start.equal_until

    def begin(self, step: int) -> None:
        """Forget everything: the state is that of the checkpoint of `step`, the same on all ranks.

        Args:
            step: The step; -1: the training has begun.
        """
        with self._lock:
            self._pending.clear()
            self._start = _Start(step)

    def check_end(self, before: HoldfastError | None) -> None:
        """Check that the last comparisons have found nothing, as the training ends.

        Args:
            before: `last_error` when the end began; the training has got it.

        Raises:
            HoldfastError: They have, and differences are raised.
        """
        if self._fail is not None and self.last_error is not None and self.last_error is not before:
            raise self.last_error

    def expect(self, digests: BlockDigests) -> None:
        """Compare these digests once the checkpoint is committed, or in RAM."""
        with self._lock:
            self._pending[digests.id] = digests
            while len(self._pending) > PENDING_MAX:
                del self._pending[next(iter(self._pending))]

    def ended(self, checkpoint: CheckpointId, *, is_durable: bool) -> None:
        """Note that a checkpoint is committed, or is in RAM; `compare` looks at it."""
        self._ended.append((checkpoint, is_durable))

    def compare(self) -> None:
        """Compare the digests of the checkpoints that ended since the last call."""
        while self._ended:
            checkpoint, is_durable = self._ended.popleft()
            with self._lock:
                digests, start = self._pending.pop(checkpoint, None), self._start
            if digests is not None:
                try:
                    is_equal = self._compare(digests, is_durable)
                except (StorageError, CheckpointDamagedError) as error:
                    log.debug("replicas of step %d: %s", checkpoint.step, error)
                else:
                    # After a restore meanwhile nothing asks this start any more.
                    start.note(checkpoint.step, digests.window, is_equal=is_equal)

    def _compare(self, own: BlockDigests, is_durable: bool) -> bool:
        """Compare with the owners' records, report differences, and return whether all is equal."""
        differing: dict[int, list[tuple[ReplicaBlock, str, str]]] = {}
        blocks = own.window.blocks
        for owner in sorted({block.owner for block in blocks}):
            key = part_key(own.id, owner, own.part_count)
            store = self._durable if is_durable else self._ram_of(owner)
            if store is None:
                raise StorageError(f"read {key}: the RAM of rank {owner}'s host cannot be read")
            part = unseal(store.get(key), PartRecord, key)
            for block, found in zip(blocks, own.digests, strict=True):
                if block.owner == owner:
                    expected = part.blocks[block.chunk.first_block + block.number]
                    if found != expected:
                        differing.setdefault(owner, []).append((block, found, expected))
        for owner, pairs in differing.items():
            self._tell(own, owner, pairs)
        return not differing

    def _tell(
        self, own: BlockDigests, owner: int, blocks: Sequence[tuple[ReplicaBlock, str, str]]
    ) -> None:
        block, found, expected = blocks[0]
        names = tuple(dict.fromkeys(block.chunk.name for block, _, _ in blocks))
        event = ReplicasDiffer(
            step=own.id.step,
            attempt=own.id.attempt.number,
            rank=self._rank,
            owner=owner,
            arrays=names[:SHOWN_MAX],
            start_bytes=block.start,
            stop_bytes=block.stop,
            digest=found,
            owner_digest=expected,
            blocks=len(blocks),
            checked=len(own.digests),
            holders=block.holders or tuple(range(own.part_count)),
        )
        self._report(event)
        text = (
            f"replicas differ at step {own.id.step}: {', '.join(names[:5])} on rank {self._rank} "
            f"is not what rank {owner} has saved ({len(blocks)} of {len(own.digests)} blocks "
            f"compared; the first: bytes [{block.start}, {block.stop}) of {block.chunk.name}); one "
            "of the two is wrong, or the program lets them differ; `holdfast status` names the "
            "rank that is alone, and ReplicaCheck(may_differ=...) declares what may differ"
        )
        log.warning("%s", text)
        self.last_error = HoldfastError(text)
        if self._fail is not None:
            self._fail(self.last_error)
