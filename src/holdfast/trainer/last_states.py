"""Keep the state that a manager was given last, by reference: nothing is copied.

After an exception of the training, or a lost rank, a state that is unchanged since is that of its
step, and can be saved though no checkpoint was due. Nothing is kept unless it is asked for: by
`ProcessHooks(keep_last=True)`, or for the managers that are opened in a block of `keeping`.

See docs/decisions/0065 and docs/decisions/0070.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.adapt.contract import Framework, HeldState
from holdfast.errors import UnsupportedLeafError
from holdfast.trainer.options import Options


@dataclass(slots=True)
class LastState:
    """What one manager was given last. Owned by the training thread.

    Attributes:
        directory: The manager's run.
        options: Its options.
        step: The step; -1: none so far.
        metrics: Its metrics, as the caller has passed them.
        held: Its state; None: it cannot be saved.
    """

    directory: str
    options: Options
    framework: Framework
    step: int = -1
    metrics: Mapping[str, float] | None = None
    held: HeldState | None = None

    def note(self, step: int, state: object, metrics: Mapping[str, float] | None) -> None:
        """Keep the state of a step in place of the one before."""
        self.step, self.metrics, self.held = step, metrics, None
        # A state that cannot be saved is refused where it is due.
        with contextlib.suppress(UnsupportedLeafError):
            self.held = self.framework.hold(state)


_kept = threading.local()
"""`states`, within a block of `keeping`."""


@contextlib.contextmanager
def keeping(*, is_asked: bool) -> Iterator[list[LastState]]:
    """Keep the last states of the managers that this thread opens in the block, if that is asked.

    Yields:
        The last states, in the order in which the managers were opened.
    """
    states: list[LastState] = []
    _kept.states = states if is_asked else None
    try:
        yield states
    finally:
        # What a state refers to must not outlive its process group.
        _kept.states = None


def last_state(directory: str, options: Options, framework: Framework) -> LastState | None:
    """Return where a manager that is opened now notes its states; None: it does not."""
    states: list[LastState] | None = getattr(_kept, "states", None)
    if states is None and not options.process.keep_last:
        return None
    state = LastState(directory, options, framework)
    if states is not None:
        states.append(state)
    return state
