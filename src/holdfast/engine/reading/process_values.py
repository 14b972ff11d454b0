"""The per-process states of objects, such as data iterators, of all processes of a checkpoint.

A job with the same number of processes gets them from a restore. A job with another number must
divide them itself, since only the owner of the objects knows how.
"""

from __future__ import annotations

from holdfast.engine.reading.sources import CheckpointSources
from holdfast.format.paths import path_name
from holdfast.format.values import decode_value


def process_values_of(sources: CheckpointSources) -> dict[str, list[object]]:
    """Return the states by name (`data/train`), each a list with one entry per rank."""
    found: dict[str, list[object]] = {
        path_name(path): [] for path in sorted(sources.spec.process_values, key=path_name)
    }
    for copies in sources.parts:
        for value in copies[0].part.values:
            found[path_name(value.path)].append(decode_value(value.value))
    return found
