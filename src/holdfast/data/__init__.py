"""The order of a training's samples: every sample once, on any number of processes and workers."""

from __future__ import annotations

from holdfast.data.order import Batch, Batches, Order, Sample, Source

__all__ = ["Batch", "Batches", "Order", "Sample", "Source"]
