"""When to save: every reason becomes a target step that the trainers will reach together.

A target lies above every step that was published when it was set, so all ranks meet it, unless one
ran past it in that very moment. Then its part carries another step, the checkpoint stays incomplete
and is dropped, and the next target lies further ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.agent import words
from holdfast.agent.ledger import Entry
from holdfast.agent.state import AgentState
from holdfast.policy.contexts import CheckpointInfo, SaveContext
from holdfast.policy.save_decision_policy import SaveDecisionPolicy

MARGIN_MAX = 64
NANOSECONDS = 1e9


@dataclass(slots=True)
class Pace:
    """How long a step takes, as the published steps tell."""

    step_secs: float | None = None
    _step: int = words.NO_STEP
    _at_secs: float = 0.0

    def see(self, step: int, now_secs: float) -> None:
        """Takes the highest step that is published now."""
        if step == self._step:
            return
        if self._step != words.NO_STEP and step > self._step:
            self.step_secs = (now_secs - self._at_secs) / (step - self._step)
        self._step, self._at_secs = step, now_secs


class Decider:
    """Sets and clears the target words."""

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._margin = 0
        self._begun_step = words.NO_STEP
        self._pace = Pace()
        self._last: dict[int, CheckpointInfo] = {}

    def tick(self) -> None:
        """Sets whatever target is due now."""
        if self._state.group is None or not self._state.group.present:
            return
        self._clear_served()
        self._pace.see(self._highest(), self._state.clock.monotonic())
        preempted = self._is_told_to_stop()
        if preempted and self._word(words.TARGET_PREEMPTION) == words.NEVER:
            target = self.request(words.TARGET_DURABLE)
            self._state.words.values[words.TARGET_PREEMPTION] = target
            self._state.events.write("preemption", target_step=target)
        self._decide(words.TARGET_DURABLE, self._state.durable_policies.save, preempted)
        self._decide(words.TARGET_RAM, self._state.ram_policies.save, preempted)

    def request(self, word: int) -> int:
        """Sets a target for the first step that no rank has published, and returns it."""
        group = self._state.group
        margin = self._margin if group and len(group.present) > 1 else 0
        target = self._highest() + 1 + margin
        self._state.words.values[word] = min(target, self._word(word))
        return self._word(word)

    def begun(self, step: int) -> None:
        """Notes that a rank takes a checkpoint of `step`, which serves the targets up to it."""
        self._begun_step = max(step, self._begun_step)
        self._clear_served()

    def _clear_served(self) -> None:
        """Clears the targets that are served, once no rank can read them for a first time.

        A rank publishes its step before it reads the targets, and says what it takes after it.
        """
        group = self._state.group
        for word in (words.TARGET_DURABLE, words.TARGET_RAM):
            target = self._word(word)
            if group is not None and target <= self._begun_step:
                seats = [member.seat for member in group.present]
                if all(self._has_read(seat, target) for seat in seats):
                    self._state.words.values[word] = words.NEVER

    def _has_read(self, seat: int, target: int) -> bool:
        taken, published = self._word(words.taken_word(seat)), self._word(words.step_word(seat))
        return taken >= target or published > target

    def taken(self, entry: Entry) -> None:
        """Notes a complete checkpoint, which the policies see as the previous one."""
        info = CheckpointInfo(entry.id.step, entry.time)
        self._last[words.TARGET_RAM] = info
        if entry.is_durable_due:
            self._last[words.TARGET_DURABLE] = info
        self._margin //= 2

    def missed(self) -> None:
        """Notes that ranks did not meet at a target."""
        self._margin = min(max(1, self._margin * 2), MARGIN_MAX)

    def reset(self) -> None:
        """Clears everything for a new group of trainers."""
        for word in (words.TARGET_DURABLE, words.TARGET_RAM, words.TARGET_PREEMPTION):
            self._state.words.values[word] = words.NEVER
        self._last.clear()
        self._margin = 0
        self._begun_step = words.NO_STEP

    def _decide(self, word: int, policy: SaveDecisionPolicy | None, preempted: bool) -> None:
        if policy is None or self._word(word) != words.NEVER:
            return
        context = SaveContext(
            now=self._state.clock.now(),
            is_saving_in_progress=self._is_saving(word),
            reached_preemption=preempted and not self._has_saved_preemption(),
            save_cost_secs=self._save_cost_secs(),
        )
        last = self._last.get(word)
        if policy.should_save(self._highest() + 1, [last] if last else [], context=context):
            self.request(word)

    def _is_saving(self, word: int) -> bool:
        """Whether a checkpoint is in progress in that tier.

        One that will be durable within about a step, if it takes as long as the last one, is in
        progress no more: so the next one is sealed about then, and storage does not wait for the
        training.
        """
        state = self._state
        if state.filling:
            return True
        if word != words.TARGET_DURABLE or not state.ledger.is_saving():
            return False
        step_secs = self._pace.step_secs
        if state.durable_at_secs is None or step_secs is None:
            return True
        is_one = sum(e.is_pending for e in state.ledger) == 1
        return not is_one or state.durable_at_secs - state.clock.monotonic() > step_secs

    def _highest(self) -> int:
        """The highest step that a rank has published."""
        group = self._state.group
        seats = [member.seat for member in group.present] if group else []
        return max((self._word(words.step_word(seat)) for seat in seats), default=words.NO_STEP)

    def _save_cost_secs(self) -> float | None:
        """What a checkpoint costs the rank that it costs most; None until one of them knows."""
        group = self._state.group
        costs = [self._word(words.cost_word(m.seat)) for m in group.present] if group else []
        known = [cost for cost in costs if cost != words.NO_COST]
        return max(known) / NANOSECONDS if known else None

    def _has_saved_preemption(self) -> bool:
        target = self._word(words.TARGET_PREEMPTION)
        return any(e.id.step >= target for e in self._state.ledger)

    def _is_told_to_stop(self) -> bool:
        group = self._state.group
        return group is not None and any(
            self._word(words.notice_word(member.seat)) for member in group.present
        )

    def _word(self, index: int) -> int:
        return self._state.words.values[index]
