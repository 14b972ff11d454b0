"""Decide when to save: reasons become wishes, and the coordination sets the step for all ranks.

The policies are asked on the host that leads; a notice to stop counts on every host.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime

from holdfast.coordination import inputs
from holdfast.coordination.effects import Reached
from holdfast.coordination.messages import CheckpointStatus, TargetKind
from holdfast.coordination.settings import step_poll_secs
from holdfast.format.names import CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.driver import Driver
from holdfast.host.metering.meters import Metering
from holdfast.host.wire.control_block import NO_STEP
from holdfast.host.wire.protocol import Notice
from holdfast.observe.events.schema import IntervalChosen
from holdfast.observe.failure_history import read_history
from holdfast.policy.contexts import CheckpointInfo, PreservationContext, SaveContext
from holdfast.policy.interval_tuner import IntervalTuner, resolution_secs
from holdfast.policy.preservation_evaluation import kept
from holdfast.policy.save_decision_policy import SaveDecisionPolicy
from holdfast.policy.save_evaluation import auto_member

AWAITED_SECS = 2.0
"""How long the report of a reached target is awaited, in time in which the agent runs."""
POLL_SECS_MIN, POLL_SECS_MAX = 0.02, 0.1
POLLS_PER_STEP = 8
"""How often the published steps are read per step: they change once a step, and reads cost time."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pace:
    """The duration of a step in one attempt, measured on the published steps.

    Attributes:
        at_secs: When the highest step was first seen.
        step_secs: The duration of a step; None: not known yet.
    """

    at_secs: float
    step_secs: float | None = None
    _step: int = NO_STEP
    _has_trained: bool = False

    def note_step(self, step: int, now_secs: float) -> None:
        """Take the highest step that is published now."""
        if step == self._step:
            return
        if self._step != NO_STEP and step > self._step:
            # The first one after a resume compiles, and began before the attempt was joined.
            if self._has_trained:
                self.step_secs = (now_secs - self.at_secs) / (step - self._step)
            self._has_trained = True
        self._step, self.at_secs = step, now_secs


class ReportWait:
    """The wait for a report of the checkpoint of the last target, bounded by `AWAITED_SECS`.

    Ranks may read the target, and its cell may be cleared, before a tick has seen that cell. So the
    wait begins with the target, and lasts at least `AWAITED_SECS` from when its cell is cleared.

    Time in which the agent did not run does not count: the report may be waiting at its socket, and
    on a loaded machine the agent, which has a low priority, may not run for seconds.
    """

    def __init__(self) -> None:
        self._target = NO_STEP
        self._left_secs = 0.0
        self._at_secs = 0.0

    def note_tick(self, target: int, now_secs: float, *, is_set: bool) -> None:
        """Count the time since the last tick, or begin anew.

        Args:
            target: The step of the newest target, reached or not.
            now_secs: The time now.
            is_set: Whether a cell still holds a target.
        """
        if is_set or target != self._target:
            self._target, self._left_secs = target, AWAITED_SECS
        else:
            self._left_secs -= min(now_secs - self._at_secs, 2 * POLL_SECS_MAX)
        self._at_secs = now_secs

    def is_on(self, reported_step: int) -> bool:
        """Return whether to wait on: no checkpoint of the target or a later step was reported."""
        return self._target > reported_step and self._left_secs > 0


def is_almost_durable(
    pending_count: int, durable_at_secs: float | None, now_secs: float, step_secs: float | None
) -> bool:
    """Return whether what is on its way to the durable tier no longer delays the next checkpoint.

    That is one checkpoint that will be durable within about a step, if it takes as long as the last
    one: the next one is sealed about then, and storage does not wait for the training.
    """
    if durable_at_secs is None or step_secs is None:
        return False
    return pending_count == 1 and durable_at_secs - now_secs <= step_secs


class SaveScheduler:
    """The scheduler of one agent; owned by the event loop."""

    def __init__(
        self, run: AgentRun, trainers: AttachedTrainers, driver: Driver, metering: Metering
    ) -> None:
        self._run = run
        self._trainers = trainers
        self._driver = driver
        self._failures = metering.failures
        self._save_times = metering.save_times
        self._began = run.clock.now()
        self._pace = Pace(run.clock.monotonic())
        self._last: dict[TargetKind, CheckpointInfo] = {}
        self._report_wait = ReportWait()
        self._reported_step = NO_STEP
        """The highest step of this attempt whose checkpoint was reported."""
        self._times: dict[CheckpointId, datetime] = {}
        self._tuners = {kind: IntervalTuner() for kind in (TargetKind.DURABLE, TargetKind.RAM)}
        self._reading: asyncio.Task[None] | None = None
        self._has_read = False
        """Whether the failures that earlier agents of the run saw are counted."""

    @property
    def poll_secs(self) -> float:
        """The time from this tick to the next."""
        step_secs = self._pace.step_secs or 0.0
        secs = min(max(step_secs / POLLS_PER_STEP, POLL_SECS_MIN), POLL_SECS_MAX)
        paused_secs = self._run.clock.monotonic() - self._pace.at_secs
        return step_poll_secs(secs, paused_secs)

    def tick(self) -> None:
        """Submit a wish for every checkpoint that is due now."""
        if not self._trainers.present:
            return
        if self._driver.view.lead.wants_preserved:
            self._preserve()
        now_secs = self._run.clock.monotonic()
        self._pace.note_step(self._trainers.published().highest, now_secs)
        target = self._trainers.last_target((TargetKind.DURABLE, TargetKind.RAM))
        self._report_wait.note_tick(target, now_secs, is_set=self._trainers.has_target)
        has_notice = self._trainers.has_notice
        if has_notice and not self._driver.view.is_preemption_confirmed:
            self._driver.submit(inputs.Wish(TargetKind.PREEMPTION))
        if self._driver.view.lead.may_decide:
            self._decide(TargetKind.DURABLE, self._trainers.job.durable.save, has_notice)
            self._decide(TargetKind.RAM, self._trainers.job.ram.save, has_notice)

    def reached(self, effect: Reached) -> None:
        """Note a checkpoint's status; policies see it as the previous one once it is complete."""
        group = self._trainers.group
        if group is not None and effect.id.attempt == group.attempt:
            self._reported_step = max(self._reported_step, effect.id.step)
        if effect.status is CheckpointStatus.COMPLETE:
            now = self._times[effect.id] = self._run.clock.now()
            info = CheckpointInfo(effect.id.step, now)
            self._last[TargetKind.RAM] = info
            if effect.is_due:
                self._last[TargetKind.DURABLE] = info
        self._preserve()

    def forget_attempt(self) -> None:
        """Forget the checkpoints of the previous attempt; another one begins."""
        self._last.clear()
        self._pace = Pace(self._run.clock.monotonic())
        self._report_wait = ReportWait()
        self._reported_step = NO_STEP

    def _preserve(self) -> None:
        """Submit what the RAM tier's policy keeps beside what the coordination keeps."""
        if not self._trainers.job.knows_policies:
            # A restarted agent whose trainers have not reattached yet: an empty answer would
            # discard checkpoints that their policy keeps.
            return
        # Checkpoints on hosts that are silent now count as well: they may come back.
        ids = sorted(c.id for c in self._driver.view.lead.checkpoints if c.was_complete)
        self._times = {c: self._times.get(c, self._run.clock.now()) for c in ids}
        policy = self._trainers.job.ram.preserve
        if policy is None:
            self._driver.submit(inputs.Preserved(frozenset()))
            return
        # Policies see steps: of two attempts' checkpoints of one step the newer one counts.
        by_step = {c.step: c for c in ids}
        infos = [CheckpointInfo(c.step, self._times[c]) for c in by_step.values()]
        flags = kept(policy, infos, context=PreservationContext(self._run.clock.now()))
        preserved = {c for c, k in zip(by_step.values(), flags, strict=True) if k}
        self._driver.submit(inputs.Preserved(frozenset(preserved)))

    def _decide(
        self, kind: TargetKind, policy: SaveDecisionPolicy | None, has_notice: bool
    ) -> None:
        view = self._driver.view
        if policy is None or kind in view.lead.targets:
            return
        costs = view.lead.save_cost_secs, self._trainers.published().save_cost_secs
        cost_secs = max((cost for cost in costs if cost is not None), default=None)
        context = SaveContext(
            now=self._run.clock.now(),
            is_saving_in_progress=self._is_saving(kind),
            reached_preemption=has_notice and not view.is_preemption_confirmed,
            save_cost_secs=cost_secs,
            advised_interval_secs=self._advised_secs(kind, policy, cost_secs),
        )
        last = self._last.get(kind)
        step = self._trainers.published().highest + 1
        if policy.should_save(step, [last] if last else [], context=context):
            self._driver.submit(inputs.Wish(kind))

    def _advised_secs(
        self, kind: TargetKind, policy: SaveDecisionPolicy, cost_secs: float | None
    ) -> float | None:
        """Return the interval for the best goodput; None: not known yet, or no policy asks."""
        member = auto_member(policy)
        if member is None:
            return None
        self._read_history()
        tuner, times = self._tuners[kind], self._save_times
        per_sec = self._failures.per_sec(
            kind,
            has_own_ram=self._trainers.job.has_ram and self._trainers.job.ram.save is not None,
            has_copies=self._driver.view.lead.has_copies,
        )
        is_ram = kind is TargetKind.RAM
        if cost_secs is not None:
            # Steps differ by chance, so that a checkpoint may seem to cost nothing.
            cost_secs = max(cost_secs, resolution_secs(self._pace.step_secs))
        has_changed = tuner.update(
            checkpoint=self._last.get(kind),
            cost_secs=cost_secs,
            per_sec=per_sec,
            max_overhead=member.max_overhead,
            least_secs=(times.sealing_secs if is_ram else times.durable_secs) or 0.0,
        )
        if has_changed and tuner.interval_secs is not None:
            chosen = IntervalChosen(
                tier=kind,
                interval_secs=round(tuner.interval_secs, 6),
                cost_secs=round(cost_secs or 0.0, 6),
                failures_per_hour=round(per_sec * 3600, 6),
            )
            self._run.events.write(chosen)
            self._report_jump(tuner.take_jump(), chosen)
        return tuner.interval_secs

    def _report_jump(self, before_secs: float | None, chosen: IntervalChosen) -> None:
        """Report a large change of an interval in the agent's log and to the trainers."""
        if before_secs is None:
            return
        place = "RAM" if chosen.tier == TargetKind.RAM else "the durable tier"
        text = (
            f"checkpoints in {place} are now "
            f"{chosen.interval_secs:.1f} s apart, {before_secs:.1f} s before: one costs "
            f"{chosen.cost_secs:.3g} s of training, and {chosen.failures_per_hour:.3g} failures an "
            "hour are expected"
        )
        log.info("%s", text)
        self._trainers.notices.post(Notice(kind="information", reason=text))

    def _read_history(self) -> None:
        """Begin to count the failures before this agent's start; once, in the background."""
        if not self._has_read:
            self._has_read = True
            self._reading = asyncio.get_running_loop().create_task(self._add_history())

    async def _add_history(self) -> None:
        home, host = self._run.durable.home, self._run.config.host
        loop = asyncio.get_running_loop()
        earlier = await loop.run_in_executor(None, read_history, home, host, self._began)
        self._failures.add_history(earlier)

    def _is_saving(self, kind: TargetKind) -> bool:
        """Return whether a checkpoint is in progress in that tier."""
        view = self._driver.view
        if self._trainers.filling or view.lead.is_sealing:
            return True
        if self._report_wait.is_on(self._reported_step):
            # Ranks are past the target, and have not reported yet that they take a checkpoint.
            return True
        if kind is not TargetKind.DURABLE or not view.lead.is_saving:
            return False
        return not is_almost_durable(
            len(view.pending_ids()),
            self._save_times.durable_at_secs,
            self._run.clock.monotonic(),
            self._pace.step_secs,
        )
