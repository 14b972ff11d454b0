"""The pipeline of a Grain iterator in words, to notice a restore into another one.

A Grain iterator accepts the position of any other one, and has other batches from there on. So a
description of its pipeline is saved beside the position, and compared before that is set. It has
one line for each node, from the last transformation to the sources: classes, seeds, sizes and
counts, the lengths of sources, and functions by their names. What does not change the batches is
left out: threads, buffers, options. So is all that may differ between two processes of one program:
addresses, paths, line numbers. Grain is not imported: its classes are known by their modules.

See docs/decisions/0066.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

LINES_MAX = 100
"""A longer description ends with a digest of the rest."""
SHOWN_MAX = 3
DEPTH_MAX = 5

_NODES = {"DatasetIterator", "MapDataset", "IterDataset", "DataLoaderIterator"}
_PARENTS = (
    *("_parents", "_map_parent", "_iter_parent", "_maybe_nonnative_parent"),
    *("_datasets", "_iterator", "_source", "_ds"),
)
# All of these are set when a node is made; the other attributes of iterators are positions.
_SETTINGS = (
    *("_seed", "_seed_rng_seed", "_global_seed", "_rng_pool", "_window_size"),
    *("_num_epochs", "_reseed_each_epoch", "_batch_size", "_drop_remainder", "_global_batch_size"),
    *("_count", "_cycle_length", "_proportions", "_strict", "_allow_nones", "_num_packing_bins"),
    *("_length_struct", "_padding_struct", "_max_sequences_per_bin", "_shuffle_bins"),
    *("_map_fn", "_filter_fn", "_batch_fn", "_flat_map", "_packer_cls", "_selection_map"),
)
_SEEDS = {"rng_pool", "seed_rng_seed", "global_seed"}
_SETTINGS_OF_DATASETS = ("_start", "_stop", "_step", "start", "stop", "step", "_transform")
_PLAIN = (type(None), bool, int, float, str)
_WITHOUT_INFLUENCE = {"ThreadPrefetchDatasetIterator", "ThreadPrefetchIterDataset"}
_WITHOUT_INFLUENCE |= {"WithOptionsIterDataset"}

_described: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def pipeline_of(leaf: object) -> tuple[str, ...] | None:
    """Return the description of the pipeline of a Grain iterator; None for any other object."""
    leaf = getattr(leaf, "leaf", leaf)  # what an adapter has wrapped
    if not _is_node(leaf):
        return None
    lines = _described.get(leaf)
    if lines is None:
        every = [*_lines(leaf, set())]
        rest = every[LINES_MAX:]
        if rest:
            digest = hashlib.sha256("\n".join(rest).encode()).hexdigest()[:16]
            every[LINES_MAX:] = [f"and {len(rest)} more: {digest}"]
        lines = _described[leaf] = tuple(every)
    return lines


def pipeline_difference(given: Sequence[str], saved: Sequence[str]) -> str | None:
    """Return how the pipeline of a given iterator differs from a saved one; None: it does not."""
    texts = []
    matcher = difflib.SequenceMatcher(None, given, saved, autojunk=False)
    for kind, start, stop, saved_start, saved_stop in matcher.get_opcodes():
        if kind != "equal":
            expected = ", ".join(given[start:stop]) or "nothing there"
            found = ", ".join(saved[saved_start:saved_stop]) or "nothing there"
            texts.append(f"expected {expected}, found {found}")
    more = len(texts) - SHOWN_MAX
    return "; ".join([*texts[:SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]) or None


def _is_node(thing: object) -> bool:
    return any(
        kind.__name__ in _NODES and kind.__module__.partition(".")[0] == "grain"
        for kind in type(thing).__mro__
    )


def _lines(node: Any, seen: set[int]) -> Iterator[str]:
    """Yield the lines of a node and of those that it reads, each node once."""
    seen.add(id(node))
    attributes = vars(node)
    parents = [parent for name in _PARENTS for parent in _nodes_in(attributes.get(name))]
    is_dataset = not hasattr(node, "__next__")
    names = (*_SETTINGS, *_SETTINGS_OF_DATASETS) if is_dataset else _SETTINGS
    settings = {name.lstrip("_"): attributes[name] for name in names if name in attributes}
    if "map_fn" in settings or "filter_fn" in settings:
        settings.pop("transform", None)
    if is_dataset and not parents:
        settings |= {"length": _length(node), "source": attributes.get("_source")}
    words = [
        f"{'seed' if name in _SEEDS else name}={_text(value)}"
        for name, value in settings.items()
        if value is not None
    ]
    if type(node).__name__ not in _WITHOUT_INFLUENCE:
        yield f"{type(node).__name__.lstrip('_')}({', '.join(words)})"
    for parent in parents:
        if id(parent) not in seen:
            yield from _lines(parent, seen)


def _nodes_in(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=str)]
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if _is_node(each)]


def _length(node: Any) -> int | None:
    try:
        return len(node)
    except TypeError:  # a source without a length
        return None


def _text(value: Any, depth: int = 0) -> str:
    """Return a setting in words: a plain value as itself, any other object by its class."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if depth < DEPTH_MAX:
        if type(value) in (list, tuple):
            return f"[{', '.join(_text(each, depth + 1) for each in value)}]"
        if isinstance(value, Mapping):
            return _call("", {str(key): value[key] for key in sorted(value, key=str)}, depth)
        if isinstance(value, functools.partial):
            named = {f"{n}": each for n, each in enumerate(value.args)} | value.keywords
            # Grain itself sets this where workers hand over batches.
            named.pop("output_to_shared_memory", None)
            return _call(_text(value.func, depth + 1), named, depth)
        if is_dataclass(value) and not isinstance(value, type):
            named = {each.name: getattr(value, each.name, None) for each in fields(value)}
            plain = {name: each for name, each in named.items() if isinstance(each, _PLAIN)}
            return _call(type(value).__qualname__, plain, depth)
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, type) and hasattr(value, "__func__"):
        return _text(owner, depth + 1)  # the transformation whose method it is
    for name in ("_seed", "_proportions"):  # Grain's own objects with one setting
        if hasattr(value, name):
            return _text(getattr(value, name), depth + 1)
    qualname = getattr(value, "__qualname__", None)
    return qualname if isinstance(qualname, str) else type(value).__qualname__


def _call(name: str, named: Mapping[str, Any], depth: int) -> str:
    """Return `name(key=value, …)`; the name alone where nothing is named."""
    words = ", ".join(f"{key}={_text(value, depth + 1)}" for key, value in named.items())
    return f"{name}({words})" if words or not name else name
