"""What DCP reports when a checkpoint cannot be read: before 2.12 it leaves out the reason."""

from __future__ import annotations

import torch

IS_REASON_SHOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def shown(reason: str) -> str:
    """Return what DCP's exception has for an error of the reader with that text."""
    return reason if IS_REASON_SHOWN else "metadata is None"
