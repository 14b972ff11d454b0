"""Define what is stored beside the items of a checkpoint: their kinds, metrics and metadata."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import outlines
from holdfast.interop.orbax.outlines import TreeOutline

RECORD = "_orbax"
"""The name of the record in the state that Holdfast saves."""
DEFAULT_ITEM = "default"
METRICS = "metrics"
RESERVED = (RECORD, METRICS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """One item: `kind` is `tree`, `array`, `json`, `key`, `numpy_random` or `folder`.

    `handler` names the foreign class of arguments, or of the handler, with which a `folder` was
    saved. `damage` is why an item that Orbax wrote cannot be read; it has no outline then.
    """

    kind: str
    outline: TreeOutline | None = None
    handler: str | None = None
    custom_metadata: Any = None
    damage: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One checkpoint: its items by name, and whether it is one unnamed item."""

    items: dict[str, ItemRecord]
    is_default: bool
    time: datetime
    metrics: Any = None
    custom_metadata: Any = None

    def encoded(self) -> str:
        """Return the record as text.

        Raises:
            InvalidArgumentError: Metrics or metadata are not JSON.
        """
        items = {
            name: {
                "kind": item.kind,
                "outline": None if item.outline is None else outlines.encoded(item.outline),
                "handler": item.handler,
                "custom_metadata": item.custom_metadata,
            }
            for name, item in self.items.items()
        }
        return json_text(
            {
                "version": 1,
                "items": items,
                "is_default": self.is_default,
                "time": self.time.isoformat(),
                "metrics": self.metrics,
                "custom_metadata": self.custom_metadata,
            },
            "the metrics and metadata",
        )


def decoded(text: str) -> StepRecord:
    """Return the record that `StepRecord.encoded` wrote."""
    content = json.loads(text)
    items = {
        name: ItemRecord(
            kind=item["kind"],
            outline=None if item["outline"] is None else outlines.decoded(item["outline"]),
            handler=item["handler"],
            custom_metadata=item["custom_metadata"],
        )
        for name, item in content["items"].items()
    }
    return StepRecord(
        items=items,
        is_default=content["is_default"],
        time=datetime.fromisoformat(content["time"]),
        metrics=content["metrics"],
        custom_metadata=content["custom_metadata"],
    )


def json_text(value: Any, what: str) -> str:
    """Return `value` as JSON; NumPy's and JAX's numbers are written as Python's.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"save: {what} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"found {type(value).__module__}.{type(value).__qualname__}")
