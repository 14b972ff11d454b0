"""Compare what this rank holds of other ranks' parts with what they have saved.

The digests are of the state that is being saved, and are compared with those in the other ranks'
part records once the checkpoint is committed. No rank waits for another one.

Invariants:
- A check neither delays nor fails a save. A record that cannot be read is not compared.
- At most `PENDING_MAX` checkpoints wait for their commit; older ones are forgotten.

See docs/decisions/0063.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.adapt.contract import Snapshot
from holdfast.engine.planning.replica_blocks import ReplicaBlock
from holdfast.errors import CheckpointDamagedError, HoldfastError, StorageError
from holdfast.format.digests import digest
from holdfast.format.names import CheckpointId, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import unseal
from holdfast.observe.events.schema import SHOWN_MAX, ReplicasDiffer
from holdfast.store.contract import Store

PENDING_MAX = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The digests of this rank's copies of some blocks of a checkpoint."""

    id: CheckpointId
    part_count: int
    blocks: Sequence[ReplicaBlock]
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


class ReplicaChecks:
    """The checks of one rank.

    `expect` and `compare` are called on the saver's thread, `committed` on any thread.

    Args:
        rank: This rank.
        durable: The durable tier, which has the part records of all ranks.
        report: Reports an event.
        fail: Raises an error in the training; None: differences are warnings.
    """

    def __init__(
        self,
        rank: int,
        durable: Store,
        report: Callable[[ReplicasDiffer], None],
        fail: Callable[[HoldfastError], None] | None,
    ) -> None:
        self._rank, self._durable, self._report, self._fail = rank, durable, report, fail
        self._pending: dict[CheckpointId, BlockDigests] = {}
        self._committed: deque[CheckpointId] = deque(maxlen=PENDING_MAX)

    def expect(self, digests: BlockDigests) -> None:
        """Compare these digests once the checkpoint is committed."""
        self._pending[digests.id] = digests
        while len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]

    def committed(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint is committed; `compare` looks at it."""
        self._committed.append(checkpoint)

    def compare(self) -> None:
        """Compare the digests of the checkpoints that were committed since the last call."""
        while self._committed:
            digests = self._pending.pop(self._committed.popleft(), None)
            if digests is not None:
                try:
                    self._compare(digests)
                except (StorageError, CheckpointDamagedError) as error:
                    log.debug("replicas of step %d: %s", digests.id.step, error)

    def _compare(self, own: BlockDigests) -> None:
        differing: dict[int, list[tuple[ReplicaBlock, str, str]]] = {}
        for owner in sorted({block.owner for block in own.blocks}):
            key = part_key(own.id, owner, own.part_count)
            part = unseal(self._durable.get(key), PartRecord, key)
            for block, found in zip(own.blocks, own.digests, strict=True):
                if block.owner == owner:
                    expected = part.blocks[block.chunk.first_block + block.number]
                    if found != expected:
                        differing.setdefault(owner, []).append((block, found, expected))
        for owner, blocks in differing.items():
            self._tell(own, owner, blocks)

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
            checked=len(own.blocks),
            holders=block.holders or tuple(range(own.part_count)),
        )
        self._report(event)
        text = (
            f"replicas differ at step {own.id.step}: {', '.join(names[:5])} on rank {self._rank} "
            f"is not what rank {owner} has saved ({len(blocks)} of {len(own.blocks)} blocks "
            f"compared; the first: bytes [{block.start}, {block.stop}) of {block.chunk.name}); one "
            "of the two is wrong, or the program lets them differ; `holdfast status` names the "
            "rank that is alone, and ReplicaCheck(may_differ=...) declares what may differ"
        )
        log.warning("%s", text)
        if self._fail is not None:
            self._fail(HoldfastError(text))
