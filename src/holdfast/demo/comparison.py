"""Compare the results of two runs bit by bit, from their journals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from holdfast.demo.journal import Finished, Record, Step

ByHost: TypeAlias = Sequence[Sequence[Record]]
"""The records of each host's trainers, over all starts."""

_EQUAL_ON_ALL_HOSTS = ("parameters", "optimizer state", "losses")


def compare(run: ByHost, other: ByHost) -> dict[str, bool]:
    """Return for each kind of result whether it is equal in every bit, on each host of both runs.

    A step that was done twice counts with both results. Hosts of one run that differ in a
    replicated result count as a difference too.
    """
    results, others = _results(run), _results(other)
    return {
        name: by_host == others[name]
        and (name not in _EQUAL_ON_ALL_HOSTS or len(set(by_host)) == 1)
        for name, by_host in results.items()
    }


def verdict(identity: dict[str, bool]) -> str:
    """Return the result of a comparison as a line."""
    return "bit-identical: " + ", ".join(
        f"{name} {'yes' if is_equal else 'NO'}" for name, is_equal in identity.items()
    )


def _results(run: ByHost) -> dict[str, list[Hashable]]:
    """Return for each kind of result that of each host."""
    ends = [next(r for r in records if isinstance(r, Finished)) for records in run]
    steps = [[r for r in records if isinstance(r, Step)] for records in run]
    return {
        "parameters": [end.params for end in ends],
        "optimizer state": [end.opt_state for end in ends],
        "RNG": [end.rng for end in ends],
        "order of batches": [
            (end.batches, end.tokens_seen, frozenset((step.step, step.batch) for step in by_host))
            for end, by_host in zip(ends, steps, strict=True)
        ],
        "losses": [frozenset((step.step, step.loss) for step in by_host) for by_host in steps],
    }
