"""The ranks of a job as threads of one process, and the words that they share.

The words are JAX's own service, in this process and on loopback, or a dict that is like it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.adapt.contract import KeyValues
from holdfast.adapt.jax.processes import JaxKeyValues
from holdfast.clock import Clock, SystemClock
from holdfast.errors import HoldfastError
from holdfast.trainer.ranks.rendezvous import Numbers, Rendezvous
from tests.ports import free_address

try:
    from jaxlib import _jax
except ImportError:  # Its name in older versions.
    from jaxlib import xla_extension as _jax

JOIN_SECS = 240.0


@dataclass
class MemoryWords:
    """Words in a dict; it counts what it is asked for."""

    words: dict[str, str] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    def put_if_absent(self, key: str, value: str) -> bool:
        self.asked["put_if_absent"] += 1
        return self.words.setdefault(key, value) is value

    def get(self, key: str) -> str | None:
        self.asked["get"] += 1
        return self.words.get(key)

    def get_many(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        self.asked["get_many"] += 1
        found = {name: self.words.get(f"{folder}/{name}") for name in names}
        return {name: word for name, word in found.items() if word is not None}

    def delete(self, folder: str, names: Sequence[str]) -> None:
        self.asked["delete"] += 1
        for name in names:
            self.words.pop(f"{folder}/{name}", None)


@contextlib.contextmanager
def jax_words() -> Iterator[JaxKeyValues]:
    """JAX's key-value service, of one client."""
    address = free_address()
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=30, shutdown_timeout=5)
    try:
        client.connect()
        yield JaxKeyValues(client)
        client.shutdown()
    finally:
        service.shutdown()


class BriskClock(SystemClock):
    """The real time, in which ranks look more often, and rank 0 does not linger."""

    def sleep(self, secs: float) -> None:
        super().sleep(min(secs, 0.01))


@dataclass
class RankOf:
    """One rank, as a framework tells of it."""

    rank: int
    count: int
    words: KeyValues
    slice_index: int | None = None

    def key_values(self) -> KeyValues:
        return self.words


def ranks(
    words: KeyValues | Callable[[int], KeyValues], count: int, clock: Clock | None = None
) -> list[Rendezvous]:
    """Each rank's part in the decisions; `control` may be one for all, or made for each."""
    return [
        rank_of(words(rank) if callable(words) else words, rank, count, clock)
        for rank in range(count)
    ]


def rank_of(words: KeyValues, rank: int, count: int, clock: Clock | None = None) -> Rendezvous:
    """One rank's part in the decisions: of thousands, to make all takes seconds."""
    return Rendezvous(RankOf(rank, count, words), clock or BriskClock(), Numbers())


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises; each runs in a thread of its own, and has to end."""
    results: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            results[index] = call()
        except (HoldfastError, ArithmeticError) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECS)
        assert not thread.is_alive(), "a rank waits for ever"
    return results
