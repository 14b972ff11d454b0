"""The amounts, such as durations, that options of commands take."""

from __future__ import annotations

import math
from typing import Any

import click


class Amount(click.FloatRange):
    """A number within bounds; "nan", which click takes for one within any bounds, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number that a user has given; see `click.ParamType.convert`."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"expected a number, found {value!r}", param, ctx)
        return number
