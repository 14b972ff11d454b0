"""One turn of a host's machine: the instant it acts in, and what it wants done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from holdfast.coordination.effects import Effect, Send
from holdfast.coordination.inputs import Published
from holdfast.coordination.messages import AnyMessage
from holdfast.coordination.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """Which run, and which start of which host's agent; `incarnation` grows with every start."""

    run: str
    host: str
    domain: str
    incarnation: int
    settings: Settings


@dataclass(slots=True)
class Turn:
    """Lives for one call. Messages of the host to itself stay inside, so one host sends none."""

    host: str
    now_secs: float
    published: Published
    effects: list[Effect] = field(default_factory=list)
    inner: deque[AnyMessage] = field(default_factory=deque)

    def send(self, host: str, message: AnyMessage) -> None:
        """Sends to another host, or hands over to the machine's other half."""
        if host == self.host:
            self.inner.append(message)
        else:
            self.effects.append(Send(host, message))

    def act(self, effect: Effect) -> None:
        """Wants something done."""
        self.effects.append(effect)


@dataclass(slots=True)
class Channel:
    """The numbers of what is told to one host: each sending, and each change of what is told."""

    content: object = None
    version: int = 0
    acked: int = 0
    sent_at_secs: float = float("-inf")

    def put(self, content: object) -> bool:
        """Takes what is to be told now; whether it is another one than before."""
        if content == self.content:
            return False
        self.content = content
        self.version += 1
        return True

    def due_at_secs(self, settings: Settings) -> float:
        """When it is to be told again."""
        is_acked = self.acked >= self.version
        wait_secs = settings.heartbeat_secs if is_acked else settings.retry_secs
        return self.sent_at_secs + wait_secs
