"""Keep the state that each manager of this process was given last, while ranks may be lost.

A state is kept by reference only within a block of `keeping`, and only of managers that are opened
there. Nothing is kept otherwise.

See docs/decisions/0065.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.adapt.contract import Framework, Snapshot
from holdfast.errors import UnsupportedLeafError
from holdfast.trainer.options import Options


class HeldState(Protocol):
    """The state of one step, by reference."""

    def change(self) -> str:
        """Return what forbids to use it as the state of its step; empty: it is unchanged."""
        ...

    def of_survivors(self, survivors: Sequence[int]) -> Snapshot | None:
        """Return the state as one of a job of some of its ranks; None if a part is lost."""
        ...


Hold = Callable[[Framework, object], HeldState | None]


@dataclass(slots=True)
class LastState:
    """What one manager was given last. Owned by the training thread.

    Attributes:
        directory: The manager's run.
        options: Its options.
        step: The step; -1: none so far.
    """

    directory: str
    options: Options
    framework: Framework
    hold: Hold
    step: int = -1
    held: HeldState | None = None

    def note(self, step: int, state: object) -> None:
        """Keep the state of a step in place of the one before."""
        self.step, self.held = step, None
        # A state that cannot be saved is refused where it is due.
        with contextlib.suppress(UnsupportedLeafError):
            self.held = self.hold(self.framework, state)


_kept = threading.local()
"""`hold` and `states`, within a block of `keeping`."""


@contextlib.contextmanager
def keeping(hold: Hold | None) -> Iterator[list[LastState]]:
    """Keep the last states of the managers that this thread opens in the block.

    Args:
        hold: Keeps a state by reference; None: nothing is kept.

    Yields:
        The last states, in the order in which the managers were opened.
    """
    _kept.hold, _kept.states = hold, []
    try:
        yield _kept.states
    finally:
        # What a state refers to must not outlive its process group.
        _kept.hold, _kept.states = None, []


def last_state(directory: str, options: Options, framework: Framework) -> LastState | None:
    """Return where a manager that is opened now notes its states; None: it does not."""
    hold: Hold | None = getattr(_kept, "hold", None)
    if hold is None:
        return None
    state = LastState(directory, options, framework, hold)
    _kept.states.append(state)
    return state
