"""The guard of the loss: what it rejects, for which checkpoints it vouches, and what it keeps."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidArgumentError, StepNotFoundError
from holdfast.format.values import decode_value, encode_value
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.loss_guard import LossGuard
from holdfast.policy.preservation_evaluation import kept, split
from holdfast.policy.preservation_policy import BestN, LatestN, PreservationPolicy
from holdfast.policy.vouching import preserving

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def curve(seed: int, steps: int) -> list[float]:
    """Return the losses of a training: a fast start, a slow end, warm restarts, and noise."""
    noise = random.Random(seed)
    level, spread = noise.uniform(0.5, 12), noise.choice([0.01, 0.05, 0.15])
    losses = []
    for step in range(steps):
        trend = level * (0.15 + math.exp(-step / 300)) * (1 + 0.1 * math.sin(step / 50))
        losses.append(trend * math.exp(noise.gauss(0, spread)))
    return losses


def checkpoints(steps: list[int], losses: list[float] | None = None) -> list[CheckpointInfo]:
    values = losses or [1.0] * len(steps)
    return [
        CheckpointInfo(step, BEGAN + timedelta(seconds=step), {"loss": loss})
        for step, loss in zip(steps, values, strict=True)
    ]


def steps_kept(policy: PreservationPolicy, infos: list[CheckpointInfo]) -> list[int]:
    flags = kept(policy, infos, context=PreservationContext(BEGAN))
    return [info.step for info, is_kept in zip(infos, flags, strict=True) if is_kept]


def test_a_guard_shows_what_it_vouches_for() -> None:
    guard = LossGuard(patience=3)
    assert not any(guard.rejects(step, 1.0) for step in range(9))
    assert repr(guard) == "LossGuard(jump=10, patience=3, last=8, vouched=5)"


@pytest.mark.parametrize("seed", range(10))
def test_a_training_that_goes_well_is_never_rejected(seed: int) -> None:
    guard = LossGuard()
    assert not any(guard.rejects(step, loss) for step, loss in enumerate(curve(seed, 2000)))
    assert guard.vouched == 1999 - 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 5, 500])
def test_a_loss_that_is_not_finite_is_rejected_at_once(bad: float, step: int) -> None:
    guard = LossGuard()
    assert not any(guard.rejects(s, loss) for s, loss in enumerate(curve(1, step)))
    assert guard.rejects(step, bad)


@pytest.mark.parametrize("seed", range(5))
def test_a_jump_is_rejected_after_the_warmup_and_named(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    guard, losses = LossGuard(), curve(seed, 600)
    for step, loss in enumerate(losses):
        assert not guard.rejects(step, loss)
    assert guard.rejects(600, 5 * losses[-1])
    assert "step 600: the loss jumps to" in caplog.text
    assert not LossGuard().rejects(0, 1e9)


def test_a_flat_loss_may_move_a_little() -> None:
    guard = LossGuard()
    for step in range(100):
        guard.rejects(step, 2.0)
    assert not guard.rejects(100, 2.99)
    assert guard.rejects(101, 3.01)


def test_losses_that_are_mostly_0_have_no_scale_for_a_jump() -> None:
    guard = LossGuard()
    assert not any(guard.rejects(step, 0.0 if step < 40 else 1e-9) for step in range(60))
    assert guard.rejects(60, math.inf)


def test_a_guard_without_its_state_vouches_for_nothing_before_it_has_judged() -> None:
    guard = LossGuard(patience=3)
    vouched = []
    for step in range(5000, 5004):
        guard.rejects(step, 1.0)
        vouched.append(guard.vouched)
    # That of step 4999 was followed by three good losses.
    assert vouched == [-1, -1, 4999, 5000]


@pytest.mark.parametrize("step", [-5, 1.5, "1"])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"LossGuard.rejects"):
        LossGuard().rejects(step, 1.0)


def test_a_checkpoint_is_vouched_for_once_the_losses_after_it_were_good() -> None:
    guard = LossGuard(patience=3, warmup=2)
    vouched = []
    for step, loss in enumerate([1, 1, 1, 1, 1, math.nan, 1, 1, 1, 1, 1]):
        guard.rejects(step, loss)
        vouched.append(guard.vouched)
    # Nothing near the bad loss counts until as many good ones have followed.
    assert vouched == [-1, -1, -1, 0, 1, 1, 1, 1, 5, 6, 7]


def test_the_losses_of_steps_that_are_trained_again_replace_the_earlier_ones() -> None:
    guard = LossGuard(patience=2, warmup=2)
    for step in range(10):
        guard.rejects(step, 1.0)
    assert guard.rejects(10, math.nan)
    assert not guard.rejects(6, 1.0)
    assert [step for step, _ in guard.get_state()["losses"]] == [0, 1, 2, 3, 4, 5, 6]
    assert guard.vouched == 5
    guard.rejects(7, 1.0)
    guard.rejects(8, 1.0)
    assert guard.vouched == 6


@given(st.integers(0, 60))
def test_a_guard_goes_on_from_its_state(cut: int) -> None:
    losses = [*curve(2, 50), math.nan, *curve(3, 10)]
    guard = LossGuard(patience=4)
    answers = [guard.rejects(step, loss) for step, loss in enumerate(losses[:cut])]
    other = LossGuard(patience=4)
    other.set_states([decode_value(encode_value(guard.get_state(), "g"))] * 2, rank=0, count=1)  # type: ignore[list-item]
    answers += [other.rejects(step, loss) for step, loss in enumerate(losses[cut:], cut)]
    whole = LossGuard(patience=4)
    assert answers == [whole.rejects(step, loss) for step, loss in enumerate(losses)]
    assert other.vouched == whole.vouched


class Several:
    """As a tensor of several elements."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


@pytest.mark.parametrize(
    "loss", [None, "1", 1 + 2j, np.ones(1), Several()], ids=lambda loss: type(loss).__name__
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    guard = LossGuard()
    with pytest.raises(InvalidArgumentError, match="expected loss to be one real number, found"):
        guard.rejects(0, loss)
    assert guard.last == -1
    assert not guard.rejects(0, np.float32(1))


def test_going_back_in_vain_ends() -> None:
    guard = LossGuard(patience=2, rewinds=2)
    for step in range(6):
        guard.rejects(step, 1.0)
    for _ in range(2):
        guard.check_rewind()
        guard.note_rewind(3, guard.vouched)
    with pytest.raises(StepNotFoundError, match=r"went back 2 times.* other samples do not help"):
        guard.check_rewind()
    with pytest.raises(StepNotFoundError, match=r"leave them out with rewind\(state, order="):
        guard.check_rewind(skips=False)
    guard.rejects(6, 1.0)
    guard.check_rewind()


def test_the_vouched_ones_are_kept_beside_what_a_policy_keeps() -> None:
    guard = LossGuard(patience=100)
    for step in range(130):
        guard.rejects(step, 1.0)
    assert guard.vouched == 29
    infos = checkpoints([*range(0, 130, 10)])
    # The two newest vouched ones, the next one to be vouched for, and the policy's own.
    assert steps_kept(preserving(LatestN(2), guard), infos) == [10, 20, 30, 110, 120]
    assert steps_kept(preserving(LatestN(2), guard), infos[:3]) == [10, 20]
    assert steps_kept(preserving(LatestN(2), LossGuard()), infos) == [0, 110, 120]


def test_a_checkpoint_that_is_not_vouched_for_displaces_no_best_one() -> None:
    guard = LossGuard(patience=10)
    for step in range(40):
        guard.rejects(step, 1.0)
    infos = checkpoints([0, 10, 20, 30, 40, 50], [3.0, 1.0, 2.0, 0.5, 0.2, 0.1])
    best = BestN(2, metric="loss", mode="min")
    assert steps_kept(best, infos) == [40, 50]
    # Of steps up to 29 the best are 10 and 20.
    assert steps_kept(preserving(best, guard), infos) == [10, 20, 30, 40, 50]


def test_there_is_a_vouched_one_however_seldom_checkpoints_become_vouched() -> None:
    guard, present = LossGuard(patience=10), list[int]()
    for step in range(200):
        guard.rejects(step, 1.0)
        present = steps_kept(preserving(LatestN(2), guard), checkpoints([*present, step]))
        if step > 40:
            newest = max(s for s in present if s <= guard.vouched)
            assert newest >= step - 25
        assert len(present) <= 6


def test_the_policies_stay_divided_between_agent_and_trainer() -> None:
    shares = split(preserving(LatestN(2), LossGuard()))
    assert shares.by_agent == LatestN(2)
    assert type(shares.by_user).__name__ == "Vouched"


def test_bad_arguments_are_named() -> None:
    for arguments in ({"jump": 0}, {"window": 0}, {"patience": -1}, {"rewinds": 0.5}):
        with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
            LossGuard(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="warmup=9"):
        LossGuard(window=8, warmup=9)
