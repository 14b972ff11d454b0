"""The worked example of docs/format.md: a run of two ranks, made by Holdfast itself."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np

from holdfast.clock import SystemClock
from holdfast.engine.attempts import AttemptStart, begin_attempt
from holdfast.engine.commit import commit
from holdfast.engine.run import create_run
from holdfast.engine.save import PartPlan, write_part
from holdfast.format.grid import slices_within
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, Container, SavedValue
from holdfast.format.values import encode_value
from holdfast.store.disk import DiskStore

RUN_ID = "5f2b8c1e9d3a47f0a6b1c2d3e4f50617"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
CHECKPOINT = CheckpointId(step=120, attempt=1)
RANKS = 2

ARRAYS = {
    ("params", "w"): np.arange(6, dtype=np.float32).reshape(2, 3),
    ("params", "scale"): np.array(1.5, ml_dtypes.bfloat16),
}
SPECS = (
    ArraySpec(
        path=("params", "scale"), shape=(), dtype="bfloat16", chunk_shape=(), owners=((1, 1),)
    ),
    ArraySpec(
        path=("params", "w"),
        shape=(2, 3),
        dtype="float32",
        chunk_shape=(2, 2),
        owners=((0, 1), (1, 1)),
    ),
)


def write_example(run: Path) -> None:
    """Writes the run of the example into `run`, which is empty."""
    store = DiskStore(run, SystemClock())
    create_run(store, "example", RUN_ID, TIME)
    start = AttemptStart(run_id=RUN_ID, origin=None, host="h0", pid=42, time=TIME)
    begin_attempt(store, start)
    spec = CheckpointSpec(
        time=TIME,
        metrics={"loss": 0.25, "grad_norm": "inf"},
        arrays=SPECS,
        containers=(Container(path=(), kind="dict"), Container(path=("params",), kind="dict")),
        values=(SavedValue(path=("epoch",), value=encode_value(7, "epoch")),),
        process_values=(("data",),),
    )
    for rank in range(RANKS):
        position = {"file": ("a.bin", rank), "left": 2**70}
        plan = PartPlan(
            run_id=RUN_ID,
            id=CHECKPOINT,
            rank=rank,
            part_count=RANKS,
            layout=image_layout(SPECS, rank),
            spec=spec,
            process_values=(SavedValue(path=("data",), value=encode_value(position, "data")),),
        )
        write_part(store, plan, _chunk_bytes)
    commit(store, CHECKPOINT, RANKS)


def _chunk_bytes(chunk: Chunk) -> memoryview:
    spec = SPECS[chunk.array_index]
    array = ARRAYS[spec.path]
    whole = ((0,) * array.ndim, array.shape)
    piece = array[slices_within((chunk.start, chunk.stop), whole)]
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
