"""Judge a training by its loss, and keep the checkpoints from which it may have to go on.

Invariant: the guard vouches for the checkpoints up to one step, after which the losses were good
for as many steps as its patience. So the state of such a checkpoint has been trained on, and has
proved sound.

See docs/decisions/0061.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from holdfast.errors import InvalidArgumentError, StepNotFoundError
from holdfast.policy import arguments
from holdfast.policy.vouching import RewindLimit

DEVIATION_OF_MAD = 1.4826
"""The standard deviation of normal noise, in medians of its absolute deviations."""
SCALE_MIN = 0.05
"""The least scale, as a part of the median: a loss that hardly changes may change a little."""

_OTHER_SAMPLES = "other samples do not help, so look at the learning rate and the data"
_SAME_SAMPLES = (
    "the same samples were used again, so leave them out with rewind(state, order=...), the "
    "holdfast.data.Order of the training"
)

log = logging.getLogger(__name__)


class LossGuard:
    """Judges each loss by those before: it has to be finite, and must not jump.

    A loss jumps if it is above the median of the last ones by more than `jump` times their scale:
    the standard deviation as their median absolute deviation estimates it, and at least 5 % of the
    median. So neither single values nor a slow change of the loss have much influence.

    Pass the guard to the manager, put it into the state, and give it the same losses on all ranks:
    the mean over the ranks, not a rank's own.

    Args:
        jump: How many scales a loss may be above the median.
        window: The number of good losses that are compared.
        warmup: The number of losses before which only finiteness is judged.
        patience: The number of steps with good losses after a checkpoint until it is vouched for.
        rewinds: How often the training may go back without coming further.

    Raises:
        InvalidArgumentError: An argument is not a positive number, or `warmup` is above `window`.
    """

    def __init__(
        self,
        *,
        jump: float = 10.0,
        window: int = 100,
        warmup: int = 20,
        patience: int = 10,
        rewinds: int = 3,
    ) -> None:
        name = type(self).__name__
        self._jump = arguments.positive_real(name, "jump", jump)
        self._window = arguments.positive_integer(name, "window", window)
        self._warmup = arguments.positive_integer(name, "warmup", warmup)
        self._patience = arguments.positive_integer(name, "patience", patience)
        self._limit = RewindLimit(arguments.positive_integer(name, "rewinds", rewinds))
        if self._warmup > self._window:
            raise InvalidArgumentError(f"{name}: expected {warmup=} of at most {window=} losses")
        self._losses: deque[tuple[int, float]] = deque(maxlen=self._window)
        self._vouched = self._last = self._rejected = -1
        self.is_saved = False
        """Whether it is in a state that was saved or restored."""

    def __repr__(self) -> str:
        return (
            f"LossGuard(jump={self._jump:g}, patience={self._patience}, last={self._last}, "
            f"vouched={self._vouched})"
        )

    @property
    def vouched(self) -> int:
        """The step up to which the guard vouches for checkpoints; -1: for none yet."""
        return self._vouched

    @property
    def last(self) -> int:
        """The last step whose loss was judged; -1 before one was."""
        return self._last

    def rejects(self, step: int, loss: SupportsFloat) -> bool:
        """Judge the loss of a step; return whether the training should go back.

        Call it on all ranks, for each step in turn. For the loss of the step before, a device need
        not be waited for.

        Returns:
            True if the loss is not finite, or jumps. The reason is logged.

        Raises:
            InvalidArgumentError: The step is no step, or the loss is not one real number.
        """
        step, value = arguments.step_number("LossGuard.rejects", "step", step), _number(loss)
        if step <= self._last:
            # The training went back: what followed is no longer its past.
            self._losses = deque((e for e in self._losses if e[0] < step), maxlen=self._window)
            self._vouched = min(self._vouched, step - 1)
            self._rejected = min(self._rejected, step - 1)
        if self._last < 0:
            # It vouches for nothing until `patience` losses were judged.
            self._rejected = step - 1
        self._last = step
        reason = self._reason(value)
        if reason is not None:
            self._rejected = step
            log.warning("step %d: %s", step, reason)
            return True
        self._losses.append((step, value))
        if step - self._patience >= self._rejected:
            self._vouched = max(self._vouched, step - self._patience)
        return False

    def _reason(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) < self._warmup:
            return None
        values = [value for _, value in self._losses]
        median = statistics.median(values)
        deviation = statistics.median(abs(value - median) for value in values)
        scale = max(DEVIATION_OF_MAD * deviation, SCALE_MIN * abs(median))
        # Most of the losses are exactly 0: no scale says what a jump from there is.
        if scale == 0 or loss <= median + self._jump * scale:
            return None
        return (
            f"the loss jumps to {loss:.6g}; the last {len(values)} good ones have the median "
            f"{median:.6g} and the scale {scale:.2g}"
        )

    def check_rewind(self, *, skips: bool = True) -> None:
        """Check that the training may go back.

        Args:
            skips: Whether the samples since then are left out.

        Raises:
            StepNotFoundError: It went back so often without coming further.
        """
        if self._limit.is_reached(self._vouched):
            raise StepNotFoundError(
                f"rewind: the training went back {self._limit.most} times to what the guard "
                f"vouches for, step {self._vouched} and before, and its loss was rejected again; "
                f"{_OTHER_SAMPLES if skips else _SAME_SAMPLES}, or go on with resume(state, "
                "step=...) from an older checkpoint"
            )

    def note_rewind(self, step: int, vouched: int | None = None) -> None:
        """Note that the training went back to the checkpoint of `step`.

        The guard still vouches for it, which its state of that time does not know.

        Args:
            step: The step of the checkpoint.
            vouched: The step up to which the guard vouched for checkpoints before it rejected a
                loss; None: that was not the reason.
        """
        if vouched is not None:
            self._limit.note(vouched)
        self._vouched = step

    def get_state(self) -> dict[str, Any]:
        """Return the last losses, and for which checkpoints the guard vouches."""
        self.is_saved = True
        return {
            "losses": [list(entry) for entry in self._losses],
            "vouched": self._vouched,
            "last": self._last,
            "rejected": self._rejected,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the state that `get_state` has returned."""
        self.is_saved = True
        losses = ((step, loss) for step, loss in state["losses"])
        self._losses = deque(losses, maxlen=self._window)
        self._vouched, self._last = state["vouched"], state["last"]
        self._rejected = state["rejected"]

    def set_states(self, states: Sequence[Mapping[str, Any]], *, rank: int, count: int) -> None:
        """Set the state from those of another number of processes, which are all the same."""
        self.set_state(states[0])


def _number(loss: SupportsFloat) -> float:
    try:
        if not isinstance(loss, str | bytes | bytearray):
            # PyTorch warns of a tensor that takes part in a gradient.
            detach = getattr(loss, "detach", None)
            return float(loss if detach is None else detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise arguments.refusal("LossGuard.rejects", "loss", "one real number", loss) from error
    raise arguments.refusal("LossGuard.rejects", "loss", "one real number", loss)
