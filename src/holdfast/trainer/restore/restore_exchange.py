"""Agree in a job on what its ranks read together from a bucket: one decision in each round.

Each rank submits what it reads there. The answer is what several ranks want, and who they are; from
that every rank computes who reads what, and who passes it on. What a rank wants alone, and what it
has in RAM, is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.coordination.rank_runs import Runs, ranks_in, runs_of
from holdfast.engine.reading.exchange import Exchange, ExchangePlace, remove_old
from holdfast.engine.reading.spans import SharedRange, Wants, shared_ranges
from holdfast.errors import HoldfastError
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text

NAME = "agree on what is read together"
JOIN_SECS = 3600.0
"""How long the ranks wait for the slowest one, which may list slow storage."""
WANTS_SIZE_MAX_BYTES = 256 * 1024
ANSWER_SIZE_MAX_BYTES = 1024 * 1024
"""Greater messages are not sent: the key-value service is made for small ones."""


class WantedRanges(msgspec.Struct, frozen=True, array_like=True):
    """What a rank reads of a checkpoint at a service, by part."""

    id: CheckpointId | None
    parts: dict[int, list[tuple[int, int]]]


class _SharedParts(msgspec.Struct, frozen=True, array_like=True):
    """What several ranks want of one checkpoint, by part: first and last block, and the ranks."""

    id: CheckpointId
    parts: dict[int, list[tuple[int, int, Runs]]]


class SharedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What is read together; ranks may try different checkpoints."""

    checkpoints: list[_SharedParts]
    problem: str = ""


@dataclass(slots=True)
class RestoreExchange:
    """One rank's part in the agreements of its restores. Owned by the training thread.

    Attributes:
        place: Returns where this rank exchanges now; None if it has no RAM tier.
        group: The name of this start of the job.
        trouble: Returns the error that ended another rank; None if there is none.
    """

    rendezvous: Rendezvous
    place: Callable[[], ExchangePlace | None]
    group: str
    trouble: Callable[[], HoldfastError | None]
    _round: int = 0
    _has_joined: bool = False
    _exchange: Exchange | None = field(default=None)

    def join(self, checkpoint: CheckpointId | None, wants: Wants) -> Exchange | None:
        """Agree with the other ranks, once in a round; see `restoring.Rounds`.

        Raises:
            HoldfastError: Another rank has ended, or failed in this round.
        """
        if self._has_joined:
            return None
        self._has_joined = True
        self._round += 1
        place = self.place()
        if place is not None and self._round == 1:
            remove_old(place.ram_folder, lambda name: not name.startswith(f"{self.group}-"))
        if place is not None and checkpoint is not None and wants:
            # Begun first: a rank that waits for another one looks at its lock.
            self._exchange = Exchange(place, f"{self.group}-{self._round}", self.rendezvous.clock)
        exchange = self._exchange
        answer = self._agree(checkpoint, wants if exchange and exchange.has_begun else {})
        if exchange is None or checkpoint is None:
            return None
        if answer.problem:
            exchange.note_problem(answer.problem)
        exchange.share(_shared_by(answer, checkpoint))
        return exchange

    def end_round(self) -> None:
        """End the round: remove what is left in RAM."""
        self._has_joined = False
        if self._exchange is not None:
            self._exchange.remove_files()
            self._exchange = None

    def _agree(self, checkpoint: CheckpointId | None, wants: Wants) -> SharedAnswer:
        ranges = {part: [*blocks] for part, blocks in wants.items()}
        value = json_text(WantedRanges(checkpoint, ranges))
        if len(value) > WANTS_SIZE_MAX_BYTES:
            value = json_text(WantedRanges(checkpoint, {}))
        answer = self.rendezvous.decide(NAME, value, _judged, JOIN_SECS, self.trouble)
        return decode(answer, SharedAnswer)


def _judged(values: list[str]) -> str:
    answer = json_text(SharedAnswer(wanted_together([decode(v, WantedRanges) for v in values])))
    if len(answer) > ANSWER_SIZE_MAX_BYTES:
        return json_text(
            SharedAnswer(
                [],
                f"exchange: what the ranks read together takes {len(answer)} bytes to say, more "
                f"than {ANSWER_SIZE_MAX_BYTES}; each reads on its own",
            )
        )
    return answer


def wanted_together(wants: Sequence[WantedRanges]) -> list[_SharedParts]:
    """Return what several ranks want of the checkpoints; `wants[r]` is what rank r wants."""
    shared = []
    for checkpoint in sorted({ranges.id for ranges in wants if ranges.id is not None}):
        parts = shared_ranges([each.parts if each.id == checkpoint else {} for each in wants])
        runs = {
            part: [
                (part_range.first, part_range.stop, runs_of(part_range.ranks))
                for part_range in ranges
            ]
            for part, ranges in parts.items()
        }
        shared.append(_SharedParts(checkpoint, runs))
    return shared


def _shared_by(answer: SharedAnswer, checkpoint: CheckpointId) -> dict[int, list[SharedRange]]:
    return {
        part: [SharedRange(first, stop, tuple(ranks_in(runs))) for first, stop, runs in ranges]
        for shared in answer.checkpoints
        if shared.id == checkpoint
        for part, ranges in shared.parts.items()
    }
