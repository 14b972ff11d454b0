"""A reader of runs written from docs/format.md alone. Dtypes that NumPy lacks are bit patterns."""

from __future__ import annotations

import base64
import json
import re
from collections import ChainMap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

BLOCK, _digest = 8 * 1024 * 1024, xxhash.xxh3_128_hexdigest
NUMPY = "bool complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"  # noqa: E501
LACKING = "float4_e2m1fn_x2 int1 uint1 int2 uint2 int4 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"  # noqa: E501
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in NUMPY.split()}
DTYPES |= dict.fromkeys(LACKING.split(), "u1") | {"bfloat16": "<u2", "complex32": "<u4"}


class BadRunError(Exception):
    """Raised if something in the run violates the format."""


class Checkpoint(NamedTuple):
    step: int
    attempt: tuple[int, str]
    arrays: dict[str, np.ndarray]
    values: dict[tuple, Any]
    rank_values: list[dict[tuple, Any]]


def read_newest(run: Path) -> Checkpoint:
    _sealed(run / "holdfast.json")
    return read_checkpoint(run, *timeline(run)[-1])


def timeline(run: Path) -> list[tuple[int, tuple[int, str]]]:
    records = {int(p.stem): p for p in run.glob(f"attempts/{'[0-9]' * 9}.json")}
    number, limits, newest = max(records), {}, {}
    while number in records:
        record = _sealed(records[number])
        attempt = tuple(record["attempt"])
        _need(attempt[0] == number, "an attempt's own number")
        limits = limits or {attempt: float("inf")}
        step, origin = record["origin"] or (0, attempt)
        if attempt not in limits or origin[0] >= number:
            break
        limits[tuple(origin)], number = step, origin[0]
    for path in run.glob("checkpoints/manifests/*.json"):
        found = re.fullmatch(r"\d{16}-(\d{9,16})\.([1-9]\d{0,8})-([0-9a-f]{8})", path.stem)
        step, attempt = (int(found[1]), (int(found[2]), found[3])) if found else (0, (0, ""))
        if path == _manifest(run, step, attempt) and step <= limits.get(attempt, -1):
            newest[step] = max(attempt, newest.get(step, attempt))
    return sorted(newest.items())


def _checkpoint(step: int, attempt: tuple[int, str]) -> str:
    return "{:09d}.{}-{}".format(step, *attempt)


def _manifest(run: Path, step: int, attempt: tuple[int, str]) -> Path:
    return run / f"checkpoints/manifests/{10**15 - step:016d}-{_checkpoint(step, attempt)}.json"


def read_checkpoint(run: Path, step: int, attempt: tuple[int, str]) -> Checkpoint:
    folder = run / "checkpoints" / _checkpoint(step, attempt)
    manifest = _sealed(_manifest(run, step, attempt))
    _need((manifest["step"], manifest["attempt"]) == (step, [*attempt]), "the manifest's own name")
    held, parts = manifest["checkpoint"], manifest["parts"]
    _need(all(spec["dtype"] in DTYPES for spec in held["arrays"]), "known dtypes")
    arrays = {_name(s["path"]): np.zeros(s["shape"], DTYPES[s["dtype"]]) for s in held["arrays"]}
    _need(len(arrays) == len(held["arrays"]), "one name for each array")
    rank_values = []
    for rank, reference in enumerate(parts):
        ending = f"{rank:05d}-of-{len(parts):05d}"
        part = _sealed(folder / f"part-{ending}.json", reference["record_digest"])
        found = [part[k] for k in ("step", "attempt", "rank", "part_count", "image_size_bytes")]
        found.append([[other["origin"][0], other["image_size_bytes"]] for other in part["reused"]])
        sizes = reference["image_size_bytes"], reference["origins"]
        _need(found == [step, [*attempt], rank, len(parts), *sizes], "the part of the manifest")
        _need(part["checkpoint"] == (None if rank else held), "rank 0's copy of the checkpoint")
        owned = (_chunks(held["arrays"], i, rank, a) for i, a in enumerate(arrays.values()))
        _read_images(folder / f"image-{ending}.safetensors", part, dict(ChainMap(*owned)))
        rank_values.append({tuple(v["path"]): _value(v["value"]) for v in part["values"]})
    values = {tuple(v["path"]): _value(v["value"]) for v in held["values"]}
    for alias in held["aliases"]:
        arrays[_name(alias["path"])] = arrays[_name(held["arrays"][alias["alias_of"]]["path"])]
    _need(len(arrays) == len(held["arrays"]) + len(held["aliases"]), "one name for each alias")
    return Checkpoint(step, attempt, arrays, values, rank_values)


def _chunks(specs: list, at: int, rank: int, whole: np.ndarray) -> dict[str, np.ndarray]:
    found, spec, runs = {}, specs[at], specs[at]["owners"]
    runs = specs[runs]["owners"] if isinstance(runs, int) else runs
    axes = list(zip(spec["chunk_shape"] if whole.size else whole.shape, whole.shape, strict=True))
    cuts = [_cuts(c, d) for c, d in axes]
    cells = list(np.ndindex(*map(len, cuts)))
    for owner, cell in zip((o for o, n in runs for _ in range(n)), cells, strict=True):
        cut = [of_axis[i] for i, of_axis in zip(cell, cuts, strict=True)]
        if owner == rank:
            index = "[" + ",".join(f"{s.start}:{s.stop}" for s in cut) + "]"
            found[_name(spec["path"]) + index * (len(cells) > 1)] = whole[(*cut, ...)]
    return found


def _cuts(cells: int | list[int], extent: int) -> list[slice]:
    even = [*range(cells, extent, cells or 1), extent] if isinstance(cells, int) else []
    stops = even or [sum(cells[: i + 1]) for i in range(len(cells))]
    _need(stops[-1:] == [extent] and sorted(stops) == stops, "cells that add up to their axis")
    return [slice(*bounds) for bounds in zip([0, *stops], stops, strict=False)]


def _read_images(path: Path, part: dict, chunks: dict[str, np.ndarray]) -> None:
    sizes, blocks = {name: view.nbytes for name, view in chunks.items()}, iter(part["blocks"])
    order = sorted(sizes, key=lambda name: (-min(sizes[name] & -sizes[name] or 64, 64), name))
    rest = {n: (chunks[n], [next(blocks, "") for _ in range(0, sizes[n], BLOCK)]) for n in order}
    _need(not [*blocks], "no more digests than blocks")
    for other in part["reused"]:
        laid, used = ({order[i] for r in other[key] for i in range(*r)} for key in ("laid", "used"))
        _need(used <= laid & rest.keys(), "each chunk once, from an image that has it")
        image = path.parents[1] / _checkpoint(*other["origin"]) / path.name
        _read_image(image, other, laid, {name: rest.pop(name) for name in used})
    _read_image(path, part, {*rest}, rest)


def _read_image(path: Path, part: dict, laid: set, used: dict) -> None:
    data = path.read_bytes() if path.is_file() else b""
    start = 8 + int.from_bytes(data[:8], "little")
    found = _digest(data[:start]), len(data)
    _need(found == (part["header_digest"], part["image_size_bytes"]), f"the header of {path.name}")
    header = json.loads(data[8:start])
    is_right = header.pop("__metadata__") == {"holdfast": "1"} and header.keys() == laid
    _need(is_right, f"the metadata and the chunks of {path.name}")
    for name, (view, digests) in used.items():
        first, stop = (start + offset for offset in header[name]["data_offsets"])
        found = [_digest(data[at : min(at + BLOCK, stop)]) for at in range(first, stop, BLOCK)]
        _need(found == digests, f"the digests of {name} in {path.name}")
        view[...] = np.frombuffer(data[first:stop], view.dtype).reshape(view.shape)


def _sealed(path: Path, expected_digest: str | None = None) -> dict:
    data = path.read_bytes() if path.is_file() else b""
    _need(data[-46:] == b',"digest":"%s"}\n' % _digest(data[:-46]).encode(), f"{path}'s digest")
    _need(expected_digest in (None, _digest(data)), f"the committed {path}")
    record = json.loads(data[:-46] + b"}")
    _need(record["format_version"] == 1, f"format version 1 in {path}")
    return record


def _name(path: list) -> str:
    keys = [re.sub(r"[%/\[\x00-\x1f\x7f]", lambda c: f"%{ord(c[0]):02X}", str(k)) for k in path]
    name = "/".join(keys) or "."
    return "%5F_metadata__" if name == "__metadata__" else name


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return [_value(v) for v in value] if isinstance(value, list) else value
    ((kind, body),) = value.items()
    if kind in ("array", "scalar", "tensor"):
        data = np.frombuffer(base64.b64decode(body["data"]), DTYPES[body["dtype"]])
        return data.reshape(body["shape"])[() if kind == "scalar" else ...]
    decode: Any = {"int": lambda v: int(v, 16), "float": float, "bytes": base64.b64decode}
    decode["tuple"] = lambda v: tuple(map(_value, v))
    decode["dict"] = lambda v: {_value(k): _value(item) for k, item in v}
    _need(kind in decode, f"a kind of value, not {kind}")
    return decode[kind](body)


def _need(holds: object, what: str) -> None:
    if not holds:
        raise BadRunError(f"expected {what}")
