"""Stop one rank for a preemption: at the step on which all hosts agree, or alone if they cannot."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast import waits
from holdfast.clock import Clock
from holdfast.host.wire.control_block import NEVER, PREEMPTION_CONFIRMED, TARGET_PREEMPTION

AGREE_SECS = 10.0
"""How long a rank with a preemption notice trains on while the hosts agree on no step to stop at.
"""
CONFIRM_SECS = 15.0
"""How long a rank that stops for a preemption waits for the other hosts' confirmation.

Together with `AGREE_SECS` and the writes this is less than the 30 s that most launchers leave.
"""
CONFIRM_POLL_SECS = 0.002
UNASKED_STEPS = 3
"""After how many steps a loop that ignores a preemption is warned."""
UNASKED_SECS = 5.0
"""After how many seconds it is warned if its steps are slow."""

log = logging.getLogger(__name__)


class PreemptionStop:
    """The stop of one rank. Owned by the training thread."""

    def __init__(self) -> None:
        self.at: int | None = None
        """The step of the preemption's checkpoint; None: no preemption has come so far."""
        self.is_unconfirmed = False
        """The ranks stop, and the hosts have not agreed on one step."""
        self.has_missed = False
        """This rank had passed the step to stop at before it was proposed."""
        self.has_asked = False
        """Whether the training loop asks whether to stop."""
        self._noticed_at_secs: float | None = None
        self._unasked_count = 0
        self._unasked_since_secs = 0.0

    def await_confirmation(self, step: int, cells: Sequence[int], clock: Clock) -> None:
        """Wait until all hosts have agreed to stop at `step`, or on a later step instead.

        A rank that has stopped cannot continue, so it must know that all others stop at the same
        step. If a later step is chosen, `at` is reset and the training continues to it.
        The wait ends after `CONFIRM_SECS` with a warning.
        """
        deadline = clock.monotonic() + CONFIRM_SECS
        while cells[PREEMPTION_CONFIRMED] > step:
            if cells[TARGET_PREEMPTION] > step:
                # Another rank had already passed this step, so a later target was proposed.
                self.at = None
                return
            if clock.monotonic() > deadline:
                self.is_unconfirmed = True
                log.warning(
                    "stopping at step %d for the preemption: the other hosts did not confirm it "
                    "within %.0f s; they may stop at another step",
                    step,
                    CONFIRM_SECS,
                )
                return
            waits.sleep(clock, CONFIRM_POLL_SECS)

    def is_left_alone(self, cells: Sequence[int], now_secs: float) -> bool:
        """Return whether the hosts have agreed on no step since this rank received a notice.

        Call it only while the rank has a preemption notice. Hosts that cannot reach each other
        never agree, and the process will soon be killed.
        """
        if self._noticed_at_secs is None:
            self._noticed_at_secs = now_secs
        has_none = cells[TARGET_PREEMPTION] == NEVER or self.has_missed
        return has_none and now_secs - self._noticed_at_secs >= AGREE_SECS

    def note_alone(self, step: int, newest_text: str) -> None:
        """Record that this rank stops at `step` without the other hosts, and warn."""
        self.is_unconfirmed = True
        log.warning(
            "stopping at step %d for the preemption: the hosts have not agreed on a step within "
            "%.0f s, so the checkpoint of this step may stay incomplete; %s",
            step,
            AGREE_SECS,
            newest_text,
        )

    def warn_unasked(self, step: int, now_secs: float) -> None:
        """Warn once if the loop continues after a preemption and never asks whether to stop."""
        if self.at is None or self.has_asked or step <= self.at:
            return
        if self._unasked_count == 0:
            self._unasked_since_secs = now_secs
        self._unasked_count += 1
        is_late = now_secs - self._unasked_since_secs >= UNASKED_SECS
        if self._unasked_count >= UNASKED_STEPS or is_late:
            self.has_asked = True
            log.warning(
                "a preemption was announced and step %d is saved for it, but the training loop "
                "continues and does not call manager.reached_preemption(step). Leave the loop when "
                "that returns True: the job will soon be killed",
                self.at,
            )
