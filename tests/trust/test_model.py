"""Compare a run with its model while it is saved, restored, deleted, killed and taken over.

A state machine applies the operations of trainers and people, and crashes, to a real agent, in this
process and over the real stores, and to a plain dict (`model_oracle`). After each step both tiers
must hold exactly what the dict holds, no more and no less, and each checkpoint that is offered must
read back bit for bit. Where the docs leave a choice, the oracle defines what it expects.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.errors import (
    FencedError,
    RunBusyError,
    StepNotFoundError,
    StepUncommittedError,
)
from holdfast.host.wire.protocol import PENDING_COUNT_MAX
from tests.engine.making import memory_folder
from tests.hosts import ROOT
from tests.trust.figures import tell
from tests.trust.in_process import Trainer
from tests.trust.model_host import ModelHost, check_offered, named, real_policy
from tests.trust.model_oracle import Id, Oracle, Policy

SEED_VARIABLE = "HOLDFAST_MODEL_SEED"
SEED = 20260801
ZOMBIES_MAX = 2

POLICIES: list[Policy] = [
    ("latest", 1),
    ("latest", 2),
    ("latest", 3),
    ("steps", 5),
    ("seconds", 60.0),
    ("any", ("latest", 1), ("seconds", 90.0)),
    ("any", ("latest", 2), ("steps", 4)),
]
GAPS = st.integers(1, 4)
PICKS = st.integers(0, 20)


def has_trainer(machine: Machine) -> bool:
    return machine.is_agent_up and machine.trainer is not None


def is_idle(machine: Machine) -> bool:
    return has_trainer(machine) and not machine.untold and machine.half is None


def is_between_saves(machine: Machine) -> bool:
    return has_trainer(machine) and not machine.untold


class Machine(RuleBasedStateMachine):
    """One run on one host. `trainer` describes what the trainer knows of itself."""

    ran: ClassVar[Counter[str]] = Counter()
    examples: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.cleanup = contextlib.ExitStack()
        root = self.cleanup.enter_context(memory_folder())
        self.host = ModelHost(Path(root))
        self.cleanup.callback(self.host.close)
        self.oracle = Oracle()
        self.host.start_agent()
        self.is_agent_up = True
        self.trainer: Trainer | None = None
        self.zombies: list[Trainer] = []
        self.last = -1
        self.untold: tuple[Id, bool] | None = None
        """A checkpoint that all ranks sealed and none told, and whether it is due."""
        self.half: tuple[Id, int, bool] | None = None
        """A checkpoint of which one rank, the second, sealed its part and told."""
        self.accepted: dict[Id, set[int]] = {}
        """Due saves that no notice came of yet, and the ranks that told."""
        self.heard: set[Id] = set()
        """What a notice came of; also of a save whose ranks had not come to tell it."""
        self.has_settled = False
        self.read_right: set[Hashable] = set()

    def teardown(self) -> None:
        self.cleanup.close()

    # Trainers come and go.

    @precondition(lambda self: self.trainer is None)
    @rule(policy=st.sampled_from(POLICIES), count=st.integers(1, 2))
    def start(self, policy: Policy, count: int) -> None:
        if not self.is_agent_up:
            self.start_agent()
        self._attach("start", policy, count, takeover=False)

    @precondition(lambda self: is_between_saves(self) and len(self.zombies) < ZOMBIES_MAX)
    @rule(policy=st.sampled_from(POLICIES), count=st.integers(1, 2))
    def take_over(self, policy: Policy, count: int) -> None:
        self.zombies.append(self.trainer)
        self._attach("take over", policy, count, takeover=True)

    def _attach(self, name: str, policy: Policy, count: int, *, takeover: bool) -> None:
        self._begin(name)
        self.host.preserve = real_policy(policy)
        offered = self.oracle.offered()
        origin = offered[-1] if offered else None
        trainer = self.host.attach(count, takeover=takeover)
        assert trainer.attempt.number == self.oracle.begin(origin, policy)
        assert trainer.place.origin == (self.host.real(*origin) if origin else None)
        self._forget()
        self.trainer = trainer
        self.last = origin.step if origin else -1

    def _be_refused(self) -> None:
        """Another group finds the run busy, and changes nothing."""
        known = len(self.host.trainers)
        with pytest.raises(RunBusyError):
            self.host.attach()
        self.host.kill_trainer(self.host.trainers.pop(known))

    @precondition(is_idle)
    @rule()
    def detach(self) -> None:
        self._begin("detach")
        self.host.detach(self.trainer)
        self._lost_trainer()

    def _kill_trainer(self) -> None:
        if self.trainer is not None:
            self.host.kill_trainer(self.trainer)
            self._lost_trainer()

    def _lost_trainer(self) -> None:
        self._forget()
        self.oracle.lose_trainers()

    def _forget(self) -> None:
        self.trainer = self.untold = self.half = None
        self.accepted.clear()
        self.heard.clear()

    # Saves.

    @precondition(lambda self: not self.untold)
    @rule(gap=GAPS, policy=st.sampled_from(POLICIES), count=st.integers(1, 2))
    def save(self, gap: int, policy: Policy, count: int) -> None:
        self._save("save", gap, True, policy, count)

    @precondition(lambda self: not self.untold)
    @rule(gap=GAPS, policy=st.sampled_from(POLICIES), count=st.integers(1, 2))
    def save_in_ram(self, gap: int, policy: Policy, count: int) -> None:
        self._save("save in RAM", gap, False, policy, count)

    def _save(self, name: str, gap: int, due: bool, policy: Policy, count: int) -> None:
        """All ranks save; where there is no trainer, one is started first."""
        self._come_back()
        if self.trainer is None:
            self.start(policy=policy, count=count)
        self._begin(name)
        self._save_all(gap, due)

    def _save_all(self, gap: int, due: bool) -> None:
        one = self._next(gap)
        for rank in range(self.trainer.count):
            self._seal(one, rank)
            self._tell(one, rank, due)
        self.half = None

    @precondition(lambda self: is_idle(self) and self.trainer.count == 2)
    @rule(gap=GAPS, due=st.booleans())
    def save_half(self, gap: int, due: bool) -> None:
        """Only the second rank comes to save."""
        self._begin("save half")
        one = self._next(gap)
        self._seal(one, 1)
        self._tell(one, 1, due)
        self.half = (one, 0, due)

    @precondition(lambda self: has_trainer(self) and self.half is not None)
    @rule()
    def save_other_half(self) -> None:
        self._begin("save other half")
        one, rank, due = self.half
        self.half = None
        self._seal(one, rank)
        self._tell(one, rank, due)

    @precondition(is_idle)
    @rule(gap=GAPS, due=st.booleans())
    def seal_untold(self, gap: int, due: bool) -> None:
        """Seal all ranks' parts without reporting them to the agent."""
        self._begin("seal untold")
        one = self._next(gap)
        for rank in range(self.trainer.count):
            self._seal(one, rank)
        self.untold = (one, due)

    @precondition(lambda self: has_trainer(self) and self.untold is not None)
    @rule()
    def tell_untold(self) -> None:
        self._begin("tell untold")
        one, due = self.untold
        self.untold = None
        for rank in range(self.trainer.count):
            self._tell(one, rank, due)

    def _next(self, gap: int) -> Id:
        self.last += gap
        return Id(self.last, self.trainer.attempt.number)

    def _seal(self, one: Id, rank: int) -> None:
        slot = self.host.want_slot(self.trainer, one, rank)
        if slot.busy:
            # Halves of this attempt wait for their other part, and are not pending by the oracle.
            halves = {
                c for c, parts in self.oracle.in_ram().items() if len(parts) < self.trainer.count
            }
            halves -= {one}
            assert self.oracle.pending_count() + len(halves) >= PENDING_COUNT_MAX
            self.settle()
            slot = self.host.want_slot(self.trainer, one, rank)
        assert slot.name is not None, slot.reason
        self.host.fill(self.trainer, one, rank, slot.name)
        self.oracle.seal(one, rank, self.trainer.count, self.host.clock.secs)

    def _tell(self, one: Id, rank: int, due: bool) -> None:
        if due and one not in self.heard:
            self.accepted.setdefault(one, set()).add(rank)
        self.host.tell_sealed(self.trainer, self.host.real(*one), rank, durable=due)
        self.oracle.tell(one, rank, due)

    # Going back.

    @precondition(lambda self: is_between_saves(self) and self.oracle.offered())
    @rule(pick=PICKS)
    def rewind(self, pick: int) -> None:
        """An older step is restored, and training goes on from there."""
        self._begin("rewind")
        self._wait_until_finished()
        offered = self.oracle.offered()
        if offered:
            one = offered[pick % len(offered)]
            self._branch(one)
            self.last = one.step

    @precondition(lambda self: is_between_saves(self) and self.oracle.offered())
    @rule(pick=PICKS, due=st.booleans())
    def overwrite(self, pick: int, due: bool) -> None:
        """A step is saved once more, with force."""
        self._begin("overwrite")
        self._wait_until_finished()
        offered = self.oracle.offered()
        if offered:
            one = offered[pick % len(offered)]
            self._branch(one)
            self.last = one.step - 1
            self._save_all(1, due)

    def _branch(self, origin: Id) -> None:
        found = self.host.look().find(origin.step)
        assert named(found) == origin
        self.host.branch(self.trainer, found)
        assert self.trainer.attempt.number == self.oracle.begin(origin)
        # A half that was left behind can never become whole.
        self.half = None

    def _wait_until_finished(self) -> None:
        """As the manager does before it goes back; a half may keep it until its patience ends."""
        if self.accepted:
            self.settle()

    # People.

    @precondition(lambda self: is_between_saves(self) and self._deletable())
    @rule(pick=PICKS)
    def delete(self, pick: int) -> None:
        self._begin("delete")
        found = self._deletable()
        one = found[pick % len(found)]
        self.host.delete(one.step)
        self.oracle.delete(one)

    def _deletable(self) -> list[Id]:
        return [one for one in self.oracle.offered() if not self.oracle.kept[one].pending]

    @rule(how=st.sampled_from(["a step", "refused", "time"]), pick=PICKS)
    def look(self, how: str, pick: int) -> None:
        """What changes nothing, and what changes the time alone."""
        self._begin(f"look: {how}")
        if how == "a step":
            self._find_a_step(pick)
        elif how == "time":
            self.host.clock.sleep(1.0 + 10.0 * pick)
        elif is_between_saves(self):
            self._be_refused()

    def _find_a_step(self, pick: int) -> None:
        """A given step is found where it is offered, and refused by name where it is not."""
        steps = sorted({*self.oracle.ever, self.last + 1})
        step = steps[pick % len(steps)]
        offered = {one.step: one for one in self.oracle.offered()}
        view = self.host.look()
        if step in offered:
            assert named(view.find(step)) == offered[step]
        elif self.oracle.is_begun(step):
            with pytest.raises(StepUncommittedError):
                view.find(step)
        else:
            with pytest.raises(StepNotFoundError):
                view.find(step)

    # The agent.

    @rule()
    def settle(self) -> None:
        self._come_back()
        self._begin("settle")
        self.host.settle()
        self.oracle.learn_written(self.host.written_on_disk())
        self.oracle.settle(self.host.committed_on_disk())
        self._learn()
        self.has_settled = True
        self._hear()
        for one, ranks in self.accepted.items():
            is_half = self.half is not None and self.half[0] == one
            assert is_half, f"nothing was told of {one}, which ranks {ranks} sealed"

    def _hear(self) -> None:
        """Take a notice as the trainer's watcher does."""
        self.heard |= self.host.answers().keys()
        for one, kind in self.host.answers().items():
            if self.accepted.pop(one, None) is not None and kind == "committed":
                assert one not in self.oracle.kept or self.oracle.kept[one].committed

    @rule(
        how=st.sampled_from(["trainer", "agent", "agent acting", "both", "both acting", "power"]),
    )
    def fail(self, how: str) -> None:
        """Something dies: a trainer, the agent, also after a commit, or all, with RAM or not."""
        self._begin(f"fail: {how}")
        if "acting" in how and self.is_agent_up:
            self.host.act_once()
            self.oracle.act_once(self.host.committed_on_disk())
            self._learn()
        if not how.startswith("agent"):
            self._kill_trainer()
        if how != "trainer" and self.is_agent_up:
            self._crash_agent()
        if how == "power":
            for zombie in self.zombies:
                self.host.kill_trainer(zombie)
            self.zombies.clear()
            self.host.lose_ram()
            self.oracle.lose_power()

    def _learn(self) -> None:
        """What the agent is free to do at once or later."""
        self.oracle.learn_written(self.host.written_on_disk())
        self.oracle.learn_gone(self.host.in_ram())

    def _crash_agent(self) -> None:
        self._hear()
        self.host.crash_agent()
        self.is_agent_up = False
        self.oracle.lose_agent()

    def _come_back(self) -> None:
        if not self.is_agent_up:
            self.start_agent()

    @precondition(lambda self: not self.is_agent_up)
    @rule()
    def start_agent(self) -> None:
        """Start another agent; live trainers reattach and report what was not answered."""
        self._begin("start agent")
        self.host.start_agent()
        self.is_agent_up = True
        self.oracle.start_agent()
        if self.trainer is None:
            return
        self.host.join(self.trainer, attempt=self.trainer.attempt)
        self.oracle.policy = self.policy_of_trainer()
        for one, ranks in list(self.accepted.items()):
            if one.attempt != self.trainer.attempt.number:
                # The manager was patient for ten minutes before it left this one behind.
                del self.accepted[one]
                continue
            for rank in sorted(ranks):
                self.host.tell_again(self.trainer, one, rank)
                if not self.oracle.kept[one].committed:
                    self.oracle.tell(one, rank, True)

    def policy_of_trainer(self) -> Policy:
        return next(p for p in POLICIES if real_policy(p) == self.host.preserve)

    # The fenced.

    @precondition(lambda self: self.is_agent_up and self.zombies)
    @rule(how=st.sampled_from(["slot", "seal", "branch", "join", "detach", "die"]), pick=PICKS)
    def act_as_zombie(self, how: str, pick: int) -> None:
        """A trainer that was overtaken is refused, and changes nothing."""
        self._begin(f"zombie: {how}")
        zombie = self.zombies[pick % len(self.zombies)]
        one = Id(self.last + 1, zombie.attempt.number)
        calls: dict[str, Any] = {
            "slot": lambda: self.host.want_slot(zombie, one),
            "seal": lambda: self.host.tell_sealed(zombie, self.host.real(*one)),
            "branch": lambda: self.host.branch(zombie, None),
            "join": lambda: self.host.join(zombie, attempt=zombie.attempt),
        }
        if how in calls:
            with pytest.raises(FencedError):
                calls[how]()
        else:
            self.zombies.remove(zombie)
            end = self.host.detach if how == "detach" else self.host.kill_trainer
            end(zombie)

    # What always holds.

    def _begin(self, name: str) -> None:
        self.has_settled = False
        self.ran[name] += 1

    @invariant()
    def both_tiers_hold_what_they_should(self) -> None:
        self._learn()
        found = self.host.committed_on_disk(), self.host.in_ram()
        expected = self.oracle.committed(), self.oracle.in_ram()
        assert found == expected, f"found {found}, expected {expected}"
        assert self.host.slots_in_use() == sum(map(len, self.oracle.in_ram().values()))

    @invariant()
    def each_checkpoint_that_is_offered_is_whole(self) -> None:
        check_offered(self.host, self.oracle.offered(), self.read_right)

    @invariant()
    def one_group_owns_the_run(self) -> None:
        if has_trainer(self):
            group = self.host.agent.trainers.group
            assert group is not None
            assert (group.group, group.attempt) == (self.trainer.group, self.trainer.attempt)
            assert group.attempt.number == max(self.oracle.attempts)

    @invariant()
    def nothing_is_left_over_once_all_is_done(self) -> None:
        if self.has_settled and self.trainer is None:
            # Whose bytes are all durable the next agent commits.
            assert self.host.unfinished(but=self.oracle.written()) == []


def run_machine(examples: int, steps: int) -> Counter[str]:
    """Runs the machine, by one seed; returns how often each rule ran."""
    number = int(os.environ.get(SEED_VARIABLE, SEED))
    print(f"to replay: {SEED_VARIABLE}={number}")
    Machine.ran, Machine.examples = Counter(), 0
    run_state_machine_as_test(
        seed(number)(Machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.ran


def test_a_run_holds_what_a_plain_dict_holds() -> None:
    # In a process of its own: Hypothesis takes constants from the modules that are loaded, so that
    # the examples would depend on the tests before this one.
    command = "from tests.trust.test_model import run_machine; print(len(run_machine(12, 40)))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 15, done.stdout


@pytest.mark.soak
def test_a_run_holds_what_a_plain_dict_holds_for_long() -> None:
    ran = run_machine(1000, 50)
    rules = ", ".join(f"{name} {count}" for name, count in ran.most_common())
    tell(
        "model",
        "1,000 examples of 50 steps",
        f"{Machine.examples:,} examples of 50 steps, {ran.total():,} acts, no difference ({rules})",
    )
