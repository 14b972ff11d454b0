"""The network of the simulator: it delays, drops, repeats, reorders, and is partitioned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.coordination.messages import AnyMessage, decode_message, encode_message


@dataclass
class Faults:
    """The present rates of faults; if all are zero, the network only delays."""

    drop: float = 0.0
    repeat: float = 0.0
    delay_secs_max: float = 0.02
    slow: float = 0.0


@dataclass
class Network:
    """Carries messages.

    Attributes:
        cut: The pairs of hosts that cannot reach each other now.
        healed_at: When those that could not can reach each other again.
    """

    rng: random.Random
    at: Callable[..., None]
    deliver: Callable[[str, str, AnyMessage], None]
    faults: Faults = field(default_factory=Faults)
    cut: set[tuple[str, str]] = field(default_factory=set)
    healed_at: dict[tuple[str, str], float] = field(default_factory=dict)
    in_flight: int = 0
    sent: int = 0
    is_on_wire: bool = False

    def send(self, sender: str, to: str, message: AnyMessage) -> None:
        self.sent += 1
        faults, rng = self.faults, self.rng
        if self.is_on_wire:
            message = decode_message(encode_message(message))
        if faults.drop and rng.random() < faults.drop:
            return
        copies = 2 if faults.repeat and rng.random() < faults.repeat else 1
        for _ in range(copies):
            delay_secs = 0.0005 + rng.random() * faults.delay_secs_max
            if faults.slow and rng.random() < faults.slow:
                delay_secs += rng.random() * 4.0
            self.in_flight += 1
            self.at(delay_secs, self._arrive, sender, to, message)

    def reaches(self, one: str, other: str) -> bool:
        return (one, other) not in self.cut

    def heal(self, pairs: set[tuple[str, str]], now: float) -> None:
        self.cut -= pairs
        self.healed_at |= dict.fromkeys(pairs, now)

    def _arrive(self, sender: str, to: str, message: AnyMessage) -> None:
        self.in_flight -= 1
        if self.reaches(sender, to):
            self.deliver(sender, to, message)
