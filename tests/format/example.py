"""The worked example of docs/format.md: a run of two ranks and two steps, made by Holdfast itself.

`python -m tests.format.example` prints its files as the document shows them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_writer import write_part
from holdfast.format.grid import slices_within
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.records import (
    ArraySpec,
    CheckpointSpec,
    Container,
    PartRecord,
    RunPlace,
    SavedValue,
)
from holdfast.format.values import encode_value
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from tests.engine.reusing import images_reusing

RUN_ID = "5f2b8c1e9d3a47f0a6b1c2d3e4f50617"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
ATTEMPT = AttemptId(1, "9f2c41ab")
FIRST, SECOND = CheckpointId(120, ATTEMPT), CheckpointId(130, ATTEMPT)
RANKS = 2

SCALES = {FIRST: 1.5, SECOND: 2.5}
W = np.arange(6, dtype=np.float32).reshape(2, 3)
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
    create_run(store, "example", RUN_ID, TIME, RunPlace(inode=5242881, path="/runs/example"))
    start = AttemptStart(run_id=RUN_ID, origin=None, host="h0", pid=42, time=TIME)
    begin_attempt(store, ATTEMPT, start)
    records: list[PartRecord] = []
    for checkpoint in (FIRST, SECOND):
        records = [_write_part(store, checkpoint, rank, records) for rank in range(RANKS)]
        commit(store, checkpoint, RANKS)


def _write_part(
    store: Store, checkpoint: CheckpointId, rank: int, before: Sequence[PartRecord]
) -> PartRecord:
    """Writes one part; all but `params/scale` is reused of the one before, where there is one."""
    spec = CheckpointSpec(
        time=TIME,
        metrics={"loss": 0.25, "grad_norm": "inf"},
        arrays=SPECS,
        containers=(Container(path=(), kind="dict"), Container(path=("params",), kind="dict")),
        values=(SavedValue(path=("epoch",), value=encode_value(7, "epoch")),),
        process_values=(("data",),),
    )
    position = {"file": ("a.bin", rank), "left": 2**70}
    plan = PartPlan(
        run_id=RUN_ID,
        id=checkpoint,
        rank=rank,
        part_count=RANKS,
        layout=image_layout(SPECS, rank),
        spec=spec,
        process_values=(SavedValue(path=("data",), value=encode_value(position, "data")),),
    )

    def chunk_bytes(chunk: Chunk) -> memoryview:
        array = W if chunk.array_index else np.array(SCALES[checkpoint], ml_dtypes.bfloat16)
        whole = ((0,) * array.ndim, array.shape)
        piece = array[slices_within((chunk.start, chunk.stop), whole)]
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data

    if not before:
        return write_part(store, plan, chunk_bytes)
    unchanged = {chunk.ordinal for chunk in plan.layout.chunks if chunk.array_index == 1}
    images = images_reusing(plan, before[rank], unchanged)
    return write_part(store, plan, chunk_bytes, images)


def shown(run: Path) -> str:
    """The files of the example as the document shows them."""
    found = []
    files = (path for path in run.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda p: (p.parent != run, p.parent, p.name[0] == "m", p)):
        key = str(path.relative_to(run))
        if path.name.endswith(".copy.json"):
            continue
        twin = path.with_name(f"{path.stem}.copy.json")
        also = f", and the same in `{twin.name}`" if twin.exists() else ""
        kind, text = ("json", path.read_text()) if path.suffix == ".json" else _image_text(path)
        found.append(f"`{key}`{also}\n\n```{kind}\n{text}```\n")
    return "\n".join(found)


def _image_text(path: Path) -> tuple[str, str]:
    data = path.read_bytes()
    header_stop = data.rindex(b"}", 0, 4096) + 1
    lines = [(0, 8, data[:8].hex()), (8, header_stop, data[8:header_stop].decode())]
    lines.append((header_stop, 4096, "spaces"))
    start = 4096
    for entry in list(json.loads(data[8:4096]).values())[1:]:
        stop = 4096 + entry["data_offsets"][1]
        lines.append((start, stop, data[start:stop].hex()))
        start = stop
    text = "".join(f"{f'bytes [{a}, {b})':<19} {what}\n" for a, b, what in lines)
    return "text", text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_example(Path(folder))
        print(shown(Path(folder)))
