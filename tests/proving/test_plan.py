"""The kills that a seed chooses, and the steps that a proof saves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import FencedError
from holdfast.local_agent.place import locked_place
from holdfast.policy.contexts import SaveContext
from holdfast.proving.plan import choose_kills
from holdfast.proving.program import KillKind
from holdfast.trainer.opening.proof import ORDER, STOPPED, ProofLink, ProofOrder, proof_steps

CONTEXT = SaveContext(
    now=SystemClock().now(), is_saving_in_progress=False, reached_preemption=False
)


def test_a_seed_chooses_the_kills() -> None:
    kills = choose_kills(3, 6, range(0, 100, 10), 4)
    assert kills == choose_kills(3, 6, range(0, 100, 10), 4) != choose_kills(4, 6, [0, 90], 4)
    assert [kill.step for kill in kills] == sorted({kill.step for kill in kills})
    assert all(0 < kill.step <= 90 for kill in kills)
    assert {kill.kind for kill in kills[:3]} == {kill.kind for kill in kills[3:]} == {*KillKind}
    assert all(0 <= kill.rank < 4 for kill in kills)


def test_a_short_training_is_killed_at_one_step_several_times() -> None:
    assert [kill.step for kill in choose_kills(0, 3, [0, 1], 1)] == [1, 1, 1]


def saved(steps: range, every: int | None = None, last: int | None = None) -> list[int]:
    policy = proof_steps(every, last)
    return [step for step in steps if policy.should_save(step, (), context=CONTEXT)]


def test_the_saved_steps_follow_from_the_step_alone() -> None:
    assert saved(range(40)) == [*range(17), 18, 20, 22, 24, 26, 28, 30, 32, 36]
    assert len(saved(range(100_000))) < 130
    assert saved(range(20), every=8, last=13) == [0, 8, 13, 16]


def test_a_program_is_ended_once_its_saves_have_ended(tmp_path: Path) -> None:
    (tmp_path / ORDER).write_bytes(msgspec.json.encode(ProofOrder(last_step=3)))
    stopped, were_stopped = tmp_path / STOPPED, list[bool]()

    class Ending(SystemClock):
        def sleep(self, secs: float) -> None:
            stopped.unlink()

    link = ProofLink(tmp_path, 0, Ending())
    with locked_place(tmp_path) as take_lock:
        assert take_lock()
        for step in (3, 4):
            link.reached(step, lambda: were_stopped.append(stopped.exists()))
    assert were_stopped == [False]


def test_a_program_ends_itself_once_its_proof_has_ended(tmp_path: Path) -> None:
    (tmp_path / ORDER).write_bytes(msgspec.json.encode(ProofOrder(stop_step=2)))
    with contextlib.ExitStack() as proof:
        assert proof.enter_context(locked_place(tmp_path))()

        class Ending(SystemClock):
            def sleep(self, secs: float) -> None:
                proof.close()

        link = ProofLink(tmp_path, 0, Ending())
        link.reached(1, lambda: None)
        # The proof ends while the process waits for its kill.
        with pytest.raises(FencedError, match=r"save step 2: .* has ended; so this program ends"):
            link.reached(2, lambda: None)
    with pytest.raises(FencedError, match="open a run: "):
        link.redirected("run")
