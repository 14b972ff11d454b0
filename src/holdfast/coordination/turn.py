"""One turn of a host's node: its input's time and published steps, and the effects it collects."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from holdfast.coordination.effects import Effect, Send
from holdfast.coordination.inputs import Published
from holdfast.coordination.messages import AnyMessage
from holdfast.coordination.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """The run, the host, and the start of its agent; `incarnation` grows with every start."""

    run: str
    host: str
    domain: str
    incarnation: int
    settings: Settings


@dataclass(slots=True)
class Turn:
    """The context of one call of `Node.handle`.

    Messages of the host to itself are queued in `inner`, so that a run on one host sends none.
    """

    host: str
    now_secs: float
    published: Published
    effects: list[Effect] = field(default_factory=list)
    inner: deque[AnyMessage] = field(default_factory=deque)

    def send(self, host: str, message: AnyMessage) -> None:
        """Send to another host, or queue for another role of this host."""
        if host == self.host:
            self.inner.append(message)
        else:
            self.effects.append(Send(host, message))

    def act(self, effect: Effect) -> None:
        """Add an effect."""
        self.effects.append(effect)


@dataclass(slots=True)
class Channel:
    """The state that is sent to one host, repeatedly, and the numbers of its versions.

    `version` grows with each change of `content`; `acked` is the last version that the other side
    has acknowledged.
    """

    content: object = None
    version: int = 0
    acked: int = 0
    sent_at_secs: float = float("-inf")

    def put(self, content: object) -> bool:
        """Replace the content; return whether it differs from the previous one."""
        if content == self.content:
            return False
        self.content = content
        self.version += 1
        return True

    def due_at_secs(self, settings: Settings) -> float:
        """Return when to send again: soon until it is acknowledged, then with each heartbeat."""
        is_acked = self.acked >= self.version
        wait_secs = settings.heartbeat_secs if is_acked else settings.retry_secs
        return self.sent_at_secs + wait_secs
