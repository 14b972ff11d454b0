"""One figure of the table: what was wanted, what was reached, and from which measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`reached` and `wanted` are ratios unless there is a unit; `at_most`: less is better."""

    row: str
    state: str
    reached: float
    wanted: float
    at_most: bool
    unit: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Whether the figure is at least as good as wanted."""
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    def as_json(self) -> dict[str, Any]:
        """The figure with its verdict."""
        return {**asdict(self), "met": self.is_met}
