"""The states of objects that each process keeps for itself, of all processes of a checkpoint.

A job of as many processes gets them back by restoring; one of another number divides them anew,
which only its owner knows how to do.
"""

from __future__ import annotations

from holdfast.engine.reading.sources import CheckpointSources
from holdfast.format.paths import path_name
from holdfast.format.values import decode_value


def process_values_of(sources: CheckpointSources) -> dict[str, list[object]]:
    """The states by name (`data/train`), each as a list with one entry a rank, in their order."""
    found: dict[str, list[object]] = {
        path_name(path): [] for path in sorted(sources.spec.process_values, key=path_name)
    }
    for copies in sources.parts:
        for value in copies[0].part.values:
            found[path_name(value.path)].append(decode_value(value.value))
    return found
