"""Compare two contents, entry by entry, and describe what differs.

Equal means the same bits: a NaN equals itself, and -0.0 differs from 0.0. Arrays whose chunks have
equal digests are equal and are not read: `check_bytes` does that. How arrays were sharded, and by
how many processes, is not compared. Objects of each process are compared by rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from holdfast.comparison.contents import ArrayEntry, Contents, Entries, pieces
from holdfast.errors import UnsupportedLeafError
from holdfast.format.grid import Region
from holdfast.format.values import encode_value

TEXT_CHARS_MAX = 60
RANKS_SHOWN_MAX = 8
ITEMS_MAX = 3
"""How many members of one list are named before they are counted instead."""

Kind = Literal["only in A", "only in B", "type", "elements", "value", "items", "metric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that differs.

    Attributes:
        name: the entry's, as `holdfast show` prints paths.
        kind: how it differs. `items`: it is a list of which several members differ.
        rank: the process whose object it belongs to; None: all.
        a: what A has, in words.
        b: what B has.
        count: how many elements or items differ.
        size: how many there are.
        largest: the largest difference of two elements or numbers; None: they are no numbers.
        saved_by: the ranks that have saved the chunks with these elements, if several have saved A.
    """

    name: str
    kind: Kind
    rank: int | None = None
    a: str = ""
    b: str = ""
    count: int = 0
    size: int = 0
    largest: float | int | None = None
    saved_by: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The difference in one line."""
        name = self.name if self.rank is None else f"{self.name} (rank {self.rank})"
        match self.kind:
            case "only in A" | "only in B":
                return f"{name}: {self.kind}: {self.a or self.b}"
            case "elements" | "items":
                unit = "elements" if self.kind == "elements" else "items"
                line = f"{name}: {self.count:,} of {self.size:,} {unit} differ"
                if self.largest is not None:
                    line += f", by at most {self.largest:.6g}"
                if self.saved_by:
                    ranks = ", ".join(map(str, self.saved_by[:RANKS_SHOWN_MAX]))
                    more = ", …" if len(self.saved_by) > RANKS_SHOWN_MAX else ""
                    line += f", saved by rank{'s' * (len(self.saved_by) > 1)} {ranks}{more}"
                return line + (f" ({self.a})" if self.a else "")
            case _:
                return f"{name}: {self.a} | {self.b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing A and B.

    Attributes:
        a: the label of A.
        b: the label of B.
        differences: what differs, arrays first.
        left_out: what could not be compared, in words.
        array_count: how many arrays were compared.
        array_bytes: their size.
        read_bytes: how much of each was read, because the digests differ or cannot be compared.
        value_count: how many values were compared.
        metric_count: how many metrics were compared.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...] = ()
    array_count: int = 0
    array_bytes: int = 0
    read_bytes: int = 0
    value_count: int = 0
    metric_count: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def documents(self) -> list[dict[str, object]]:
        """The differences as JSON shows them."""
        return [{**asdict(difference), "text": difference.text} for difference in self.differences]

    @property
    def has_common(self) -> bool:
        """Whether any entry is in both."""
        return self.array_count + self.value_count > 0


@dataclass(slots=True)
class _Tally:
    """What has been compared so far."""

    arrays: list[Difference] = field(default_factory=list)
    values: list[Difference] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    array_count: int = 0
    array_bytes: int = 0
    read_bytes: int = 0
    value_count: int = 0


def compare(a: Contents, b: Contents) -> Comparison:
    """Compare two contents.

    Raises:
        CheckpointDamagedError, StorageError: elements cannot be read.
    """
    tally = _Tally()
    of_ranks = a.of_ranks, b.of_ranks
    shared_a, shared_b = a.entries, b.entries
    if a.is_file or b.is_file:
        shared_a, shared_b = _merged(a), _merged(b)
    elif len(a.of_ranks) == len(b.of_ranks):
        for rank, (own_a, own_b) in enumerate(zip(*of_ranks, strict=True)):
            _compare_entries(own_a, own_b, tally, rank if len(a.of_ranks) > 1 else None)
    else:
        names = sorted(
            {name.partition("/")[0] for own in (*of_ranks[0], *of_ranks[1]) for name in own}
        )
        if names:
            tally.left_out.append(
                f"{', '.join(names)}: states of each process's own, of {len(a.of_ranks)} processes "
                f"in A and {len(b.of_ranks)} in B"
            )
    shared_a, shared_b = _renamed(shared_a, b), _renamed(shared_b, a)
    if not (a.has_values and b.has_values):
        shared_a, shared_b = (
            _arrays_alone(shared_a, shared_b, a.label, tally),
            _arrays_alone(shared_b, shared_a, b.label, tally),
        )
    _compare_entries(shared_a, shared_b, tally, None)
    metrics: list[Difference] = []
    if not (a.is_file or b.is_file):
        metrics = list(_metric_differences(a.metrics, b.metrics))
    return Comparison(
        a=a.label,
        b=b.label,
        differences=(*tally.arrays, *_grouped(tally.values, (shared_a, *a.of_ranks)), *metrics),
        left_out=tuple(tally.left_out),
        array_count=tally.array_count,
        array_bytes=tally.array_bytes,
        read_bytes=tally.read_bytes,
        value_count=tally.value_count,
        metric_count=len(a.metrics.keys() & b.metrics.keys()),
    )


def _merged(contents: Contents) -> Entries:
    """Return all entries in one, of a single process."""
    if len(contents.of_ranks) == 1:
        return {**contents.entries, **contents.of_ranks[0]}
    return contents.entries


def _renamed(entries: Entries, other: Contents) -> Entries:
    if other.to_name is None:
        return entries
    return {other.to_name(name): entry for name, entry in entries.items()}


def _arrays_alone(entries: Entries, others: Entries, label: str, tally: _Tally) -> Entries:
    """Return the arrays of a side, without second names of arrays that the other side lacks."""
    arrays = {name: entry for name, entry in entries.items() if isinstance(entry, ArrayEntry)}
    if len(arrays) < len(entries):
        count = len(entries) - len(arrays)
        tally.left_out.append(f"{count} values of {label}: the other side has arrays alone")
    return {
        name: entry for name, entry in arrays.items() if entry.alias_of is None or name in others
    }


def _compare_entries(a: Entries, b: Entries, tally: _Tally, rank: int | None) -> None:
    for name, left in a.items():
        is_array = isinstance(left, ArrayEntry)
        differences = tally.arrays if is_array else tally.values
        if name not in b:
            differences.append(Difference(name=name, kind="only in A", rank=rank, a=text_of(left)))
            continue
        right = b[name]
        if is_array and isinstance(right, ArrayEntry):
            difference = _array_difference(name, left, right, tally, rank)
        else:
            tally.value_count += 1
            difference = _value_difference(name, left, right, rank)
        if difference is not None:
            differences.append(difference)
    for name, right in b.items():
        if name not in a:
            differences = tally.arrays if isinstance(right, ArrayEntry) else tally.values
            differences.append(Difference(name=name, kind="only in B", rank=rank, b=text_of(right)))


def _array_difference(
    name: str, a: ArrayEntry, b: ArrayEntry, tally: _Tally, rank: int | None
) -> Difference | None:
    tally.array_count += 1
    has_traits = a.traits is not None and b.traits is not None
    if (a.shape, a.dtype) != (b.shape, b.dtype) or (has_traits and a.traits != b.traits):
        return Difference(name=name, kind="type", rank=rank, a=a.type_text, b=b.type_text)
    count, largest, saved_by = 0, None, set[int]()
    for region, rank_of_chunk in _differing_regions(a, b):
        left, right = (np.ascontiguousarray(side.read(region)) for side in (a, b))
        tally.read_bytes += left.nbytes
        is_different = _bits(left) != _bits(right)
        if is_different.ndim > 1:
            is_different = is_different.any(axis=1)
        number = int(is_different.sum())
        if number:
            count += number
            saved_by |= {rank_of_chunk} if rank_of_chunk is not None else set()
            pair = left.reshape(-1)[is_different], right.reshape(-1)[is_different]
            largest = _largest_of([largest, _largest(*pair)])
    tally.array_bytes += a.size_bytes
    if not count:
        return None
    has_numbers = not any("keys" in trait for trait in a.traits or ())
    return Difference(
        name=name,
        kind="elements",
        rank=rank,
        a=a.type_text,
        count=count,
        size=math.prod(a.shape),
        largest=largest if has_numbers else None,
        saved_by=tuple(sorted(saved_by)),
    )


def _differing_regions(a: ArrayEntry, b: ArrayEntry) -> Iterator[tuple[Region, int | None]]:
    """Yield the regions in which elements may differ, in pieces that fit into memory.

    Each has the rank that has saved it in A; None: it is not known, or A has one rank.
    """
    whole: Region = (0,) * len(a.shape), a.shape
    regions: Sequence[tuple[Region, int | None]] = [(whole, None)]
    left, right = a.digests(), b.digests()
    if left is not None and right is not None and left.regions == right.regions:
        ranks = left.ranks if a.has_ranks else [None] * len(left.regions)
        chunks = zip(left.regions, left.digests, right.digests, ranks, strict=True)
        regions = [(region, rank) for region, one, other, rank in chunks if one != other]
    for region, rank in regions:
        for piece in pieces(region):
            yield piece, rank


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of each element, as one integer or a row of bytes."""
    item = array.dtype.itemsize
    flat = array.reshape(-1)
    return flat.view(f"u{item}") if item in (1, 2, 4, 8) else flat.view("u1").reshape(-1, item)


def _largest(a: np.ndarray, b: np.ndarray) -> float | int | None:
    """Return the largest difference of elements at the same place; None: they are no numbers."""
    if a.dtype.fields is not None:
        return None
    if a.dtype.kind in "iu":
        unsigned = f"u{a.dtype.itemsize}"
        with np.errstate(over="ignore"):
            # Modulo 2^n the difference of the larger and the smaller one is exact.
            gaps = np.where(
                a > b, a.view(unsigned) - b.view(unsigned), b.view(unsigned) - a.view(unsigned)
            )
        return int(gaps.max())
    if a.dtype.kind == "b":
        return 1
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        gaps = np.abs(a.astype(wide) - b.astype(wide))
    return float(gaps.max())


def _largest_of(numbers: Sequence[float | int | None]) -> float | int | None:
    """Return the largest number, or NaN if one is; None: all are none."""
    present = [number for number in numbers if number is not None]
    is_nan = any(math.isnan(number) for number in present)
    return math.nan if is_nan else max(present, default=None)


def _value_difference(name: str, a: object, b: object, rank: int | None) -> Difference | None:
    if _encoded(a) == _encoded(b):
        return None
    largest = None
    if type(a) is type(b) and type(a) in (int, float):
        largest = abs(a - b)  # type: ignore[operator]
    return Difference(
        name=name,
        kind="value",
        rank=rank,
        a=text_of(a),
        b=text_of(b),
        count=1,
        size=1,
        largest=largest,
    )


def _encoded(value: object) -> object:
    if isinstance(value, ArrayEntry):
        return value.type_text
    try:
        return msgspec.json.encode(encode_value(value, ""))
    except UnsupportedLeafError:
        return type(value), repr(value)


def _metric_differences(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[Difference]:
    for name in {**a, **b}:
        sides = [repr(metrics[name]) if name in metrics else "none" for metrics in (a, b)]
        if sides[0] != sides[1]:
            largest = abs(a[name] - b[name]) if name in a and name in b else None
            yield Difference(
                name=name, kind="metric", a=sides[0], b=sides[1], count=1, size=1, largest=largest
            )


def _grouped(differences: Sequence[Difference], sides: Sequence[Entries]) -> Iterator[Difference]:
    """Yield the differences, those of many members of one list as one."""
    by_list: dict[tuple[str, int | None], list[Difference]] = {}
    for difference in differences:
        parent, _, key = difference.name.rpartition("/")
        is_member = difference.kind == "value" and key.isdecimal()
        group = (parent if is_member else difference.name), difference.rank
        by_list.setdefault(group, []).append(difference)
    for (name, rank), members in by_list.items():
        if len(members) <= ITEMS_MAX:
            yield from members
            continue
        size = max(sum(other.rpartition("/")[0] == name for other in side) for side in sides)
        numbers = [member.largest for member in members]
        yield Difference(
            name=name,
            kind="items",
            rank=rank,
            count=len(members),
            size=size,
            largest=None if None in numbers else _largest_of(numbers),
        )


def text_of(entry: Any) -> str:
    """Return an entry in a few words."""
    if isinstance(entry, ArrayEntry):
        return entry.type_text
    try:
        text = repr(entry)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        text = f"a large {type(entry).__name__}"
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"
