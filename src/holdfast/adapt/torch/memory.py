"""Which of the tensors to fill share memory, and whether what is restored agrees there.

A state may have a buffer and views into it, a transposed view of a weight, or an expanded tensor.
All can be filled if the saved elements for one place in memory are equal; otherwise the last one
would replace the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.adapt.torch import tensors
from holdfast.format.grid import Region
from holdfast.format.paths import Path, path_name


class Place(NamedTuple):
    """The memory of a tensor: bytes from `start` to `stop`, of which its elements are a part."""

    path: Path
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    item_size_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether the elements are all of the memory, in their order."""
        return self.stop - self.start == self.item_size_bytes * math.prod(self.shape)


def shared_places(to_fill: Iterable[tuple[Any, Path]]) -> list[list[Place]]:
    """Return the groups of tensors whose memory may overlap; also single ones with themselves.

    Args:
        to_fill: Tensors with their paths, without those that are tied to another one of them.
    """
    by_device: dict[torch.device, list[Place]] = {}
    for leaf, path in to_fill:
        held = leaf if tensors.is_plain(leaf) else tensors.local(leaf)
        if held.layout is torch.strided and held.numel() and not held.is_meta:
            by_device.setdefault(held.device, []).append(_place(held, path))
    return [
        group
        for places in by_device.values()
        for group in _groups(sorted(places, key=lambda place: place.start))
        if len(group) > 1 or not group[0].is_dense
    ]


def _place(held: torch.Tensor, path: Path) -> Place:
    size, start = held.element_size(), held.data_ptr()
    strides = tuple([stride * size for stride in held.stride()])
    if held.is_contiguous():
        stop = start + held.nbytes
    else:
        pairs = zip(held.shape, strides, strict=True)
        stop = start + size + sum((n - 1) * stride for n, stride in pairs)
    return Place(path, start, stop, held.shape, strides, size)


def _groups(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Divide places, which ascend, where no place reaches across."""
    group: list[Place] = []
    farthest = 0
    for place in places:
        if group and place.start >= farthest:
            yield group
            group = []
        group.append(place)
        farthest = max(farthest, place.stop)
    if group:
        yield group


def differences(
    groups: Iterable[Sequence[Place]], buffers: Mapping[Path, Mapping[Region, np.ndarray]]
) -> list[str]:
    """Return a text for each group in which the restored elements differ where memory is shared.

    It fills memory of its own as the tensors would be, and compares. A group takes as much memory
    meanwhile as its tensors lie in.
    """
    texts = []
    for group in groups:
        start, stop = group[0].start, max(place.stop for place in group)
        memory = np.empty(stop - start, np.uint8)
        restored = [
            (_elements(memory, place, start), _bytes(place, buffer), place)
            for place in group
            for buffer in buffers.get(place.path, {}).values()
        ]
        for elements, values, _ in restored:
            elements[...] = values
        if not all(np.array_equal(elements, values) for elements, values, _ in restored):
            names = " and ".join(path_name(place.path) for *_, place in restored)
            texts.append(
                f"{names}: expected elements that are equal where those of the tensors given are "
                "one in memory, found different ones; give clones"
            )
    return texts


def _elements(memory: np.ndarray, place: Place, start: int) -> np.ndarray:
    shape, strides = (*place.shape, place.item_size_bytes), (*place.strides, 1)
    return np.ndarray(shape, np.uint8, memory.data, place.start - start, strides)


def _bytes(place: Place, buffer: np.ndarray) -> np.ndarray:
    dense = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    return dense.reshape((*place.shape, place.item_size_bytes))
