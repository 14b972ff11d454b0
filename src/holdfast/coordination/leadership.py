"""What a leader leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.format.names import CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """What a leader leads. `is_first`: it is rank 0's host, not a successor in its place."""

    attempt: int
    group: str
    rank_count: int
    origin: CheckpointId | None
    limits: Mapping[int, int]
    successors: tuple[str, ...]
    term: int = 0
    is_first: bool = True
