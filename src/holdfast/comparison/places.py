"""Open what a user has named, as contents: a step of a run, safetensors, a file of PyTorch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.comparison.contents import (
    ArrayEntry,
    Contents,
    Entries,
    array_entry,
    value_entries,
)
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    StepNotFoundError,
    translated,
)
from holdfast.format.dtypes import dtype_of_safetensors, numpy_dtype
from holdfast.format.json_codec import decode
from holdfast.format.paths import PathPrefixes, path_name
from holdfast.interop.safetensors_export import tensor_name
from holdfast.reading import (
    Checkpoint,
    FillTarget,
    Region,
    StoredArray,
    open_checkpoint,
    region_shape,
)
from holdfast.store.location import RunLocation
from holdfast.trainer.run import open_run

HEADER_BYTES_MAX = 100 * 1024 * 1024
ENDING = ".safetensors"
DCP_METADATA = ".metadata"


@contextlib.contextmanager
def opened(place: str, prefix: str = "") -> Iterator[Contents]:
    """Open the contents of a place for the block.

    Args:
        place: `RUN`, `RUN@STEP`, a file or folder of safetensors, or what PyTorch has saved. A file
            of PyTorch is imported into a folder for temporary files, of which nothing is executed.
        prefix: only what is at or below this path in a run or a file of PyTorch. The names in
            safetensors are relative to it.

    Raises:
        InvalidArgumentError: nothing is there, or it has a step and is no run.
        StepNotFoundError: the run has no such step.
        HoldfastError: it cannot be read.
    """
    directory, step = split_step(place)
    path = Path(directory)
    if _is_run(directory):
        yield run_contents(directory, step, prefix)
        return
    if not path.exists():
        run, _, text = place.rpartition("@")
        if run and _is_run(run):
            raise InvalidArgumentError(
                f"compare {place}: expected RUN@STEP with a step's number, found {text!r}"
            )
        raise InvalidArgumentError(
            f"compare {place}: expected a run, a file or a folder, found nothing there"
        )
    if step is not None:
        raise InvalidArgumentError(f"compare {place}: expected a run, found something else")
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    if files and all(file.suffix == ENDING for file in files):
        yield safetensors_contents(place, files, prefix)
        return
    if path.is_dir() and not (path / DCP_METADATA).exists():
        raise InvalidArgumentError(
            f"compare {place}: expected a run, safetensors or what PyTorch has saved, found a "
            "folder of something else; what Orbax has saved is read after `holdfast import`"
        )
    from holdfast.interop.torch_files import import_torch

    with tempfile.TemporaryDirectory(prefix="holdfast-diff-") as folder:
        imported = Path(folder, "imported")
        import_torch(path, imported, task="compare")
        contents = run_contents(str(imported), 0, prefix)
        yield replace(contents, label=place, is_file=True, entries=_untyped(contents.entries))


def _untyped(entries: Entries) -> Entries:
    """Return entries whose arrays are of a dtype and a shape alone, as those of other programs."""
    return {
        name: replace(entry, traits=None) if isinstance(entry, ArrayEntry) else entry
        for name, entry in entries.items()
    }


def with_one_step(a: str, b: str) -> tuple[str, str]:
    """Return both places, of two runs without steps with the newest step that both have.

    So a run that goes on meanwhile is compared at one step. Runs that have no step in common are
    returned as they are.

    Raises:
        HoldfastError: a run cannot be read.
    """
    if any(split_step(place)[1] is not None or not _is_run(place) for place in (a, b)):
        return a, b
    with open_run(a) as run:
        step = run.latest_step()
        steps = set() if a == b else {*run.all_steps()}
    if a != b:
        with open_run(b) as run:
            step = max(steps.intersection(run.all_steps()), default=None)
    return (a, b) if step is None else (f"{a}@{step}", f"{b}@{step}")


def _is_run(directory: str) -> bool:
    location = RunLocation(directory)
    return location.is_url or location.record.exists()


def split_step(place: str) -> tuple[str, int | None]:
    """Return the directory and the step of `RUN@STEP`."""
    directory, at, number = place.rpartition("@")
    if not at or not directory or not number.isdecimal() or os.path.exists(place):
        return place, None
    return directory, int(number)


def run_contents(directory: str, step: int | None = None, prefix: str = "") -> Contents:
    """Return the contents of a step of a run, else of its newest one.

    Raises:
        StepNotFoundError: there is none.
        HoldfastError: the run cannot be read.
    """
    if step is None:
        with open_run(directory) as run:
            step = run.latest_step()
        if step is None:
            raise StepNotFoundError(f"compare {directory}: it has no checkpoint yet")
    with _damage_named(directory, step):
        checkpoint = open_checkpoint(directory, step)
    prefixes = PathPrefixes((prefix.strip("/") or ".",))
    entries: dict[str, Any] = {
        array.name: _stored(directory, checkpoint, array)
        for array in checkpoint.arrays.values()
        if prefixes.covers(array.path)
    }
    of_ranks = tuple(
        dict(
            entry
            for path, value in values.items()
            if prefixes.covers(path)
            for entry in value_entries(path, value)
        )
        for values in checkpoint.process_values
    )
    for path, value in checkpoint.values.items():
        if prefixes.covers(path):
            entries.update(value_entries(path, value))
    return Contents(
        label=f"{directory}@{step}",
        entries=entries,
        of_ranks=of_ranks if any(of_ranks) else (),
        metrics=checkpoint.metrics,
    )


@contextlib.contextmanager
def _damage_named(directory: str, step: int) -> Iterator[None]:
    """Name the command that lists what is damaged, in an error of the block."""
    try:
        yield
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(
            f"compare {directory}@{step}: {error}; `holdfast verify {directory} {step}` lists the "
            "bad bytes"
        ) from error


def _stored(directory: str, checkpoint: Checkpoint, array: StoredArray) -> ArrayEntry:
    path = array.alias_of or array.path
    traits = {
        f"{array.prng_impl} keys": array.prng_impl is not None,
        "NumPy scalar": array.is_scalar,
        "weak type": array.is_weak,
    }

    def read(region: Region) -> np.ndarray:
        buffer = np.empty(region_shape(region), array.numpy_dtype)
        with _damage_named(directory, checkpoint.step):
            checkpoint.fill([FillTarget(path, region, buffer)])
        return buffer

    return ArrayEntry(
        shape=array.shape,
        dtype=array.dtype,
        read=read,
        traits=tuple(trait for trait, has in traits.items() if has),
        digests=lambda: checkpoint.digests[path],
        has_ranks=len(checkpoint.process_values) > 1,
        alias_of=path_name(array.alias_of) if array.alias_of else None,
    )


def safetensors_contents(label: str, files: Sequence[Path], prefix: str = "") -> Contents:
    """Return the contents of safetensors files, which are read without a framework.

    Args:
        label: the name in results.
        files: the files, of one checkpoint.
        prefix: the path in the other side to which the names are relative.

    Raises:
        CheckpointDamagedError: a file is none of safetensors.
        StorageError: it cannot be read.
    """
    entries: dict[str, Any] = {}
    for file in files:
        entries |= dict(_tensors(file))
    start = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    return Contents(
        label=label,
        entries=entries,
        is_file=True,
        has_values=False,
        to_name=lambda name: tensor_name(name.removeprefix(start)),
    )


def _tensors(file: Path) -> Iterator[tuple[str, ArrayEntry]]:
    """Yield the arrays of one file of safetensors."""
    try:
        with translated("read", file):
            data = np.memmap(file, np.uint8, "r")
        header_bytes = int.from_bytes(data[:8].tobytes(), "little")
        header = _header(data[8 : 8 + min(header_bytes, HEADER_BYTES_MAX)].tobytes())
        for name, tensor in header.items():
            name_of_dtype = dtype_of_safetensors(tensor.dtype) or tensor.dtype
            dtype = numpy_dtype(name_of_dtype)
            if dtype is None:
                raise ValueError(f"{name} of the dtype {tensor.dtype}")
            start, stop = tensor.data_offsets
            body = data[8 + header_bytes :][start:stop]
            array = body.view(dtype).reshape(tensor.shape)
            yield name, array_entry(array)
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointDamagedError(f"read {file}: expected safetensors, found {error}") from error


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _header(text: bytes) -> dict[str, _Tensor]:
    entries = decode(text, dict[str, msgspec.Raw])
    return {
        name: decode(bytes(entry), _Tensor)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
