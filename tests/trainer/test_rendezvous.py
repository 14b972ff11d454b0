"""What the processes of a job decide, over JAX's key-value service and a dict that is like it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast import errors
from holdfast.adapt.contract import KeyValues, OwnProcess
from holdfast.adapt.jax.processes import JaxKeyValues
from holdfast.clock import SystemClock
from holdfast.coordination.rank_runs import ranks_text
from holdfast.launchers import launch_of
from holdfast.trainer.ranks import rendezvous
from holdfast.trainer.ranks.bounded_entries import BoundedEntries
from holdfast.trainer.ranks.rendezvous import (
    GRACE_SECS,
    LINGER_SECS,
    POLL_SECS_MAX,
    ROOT,
    Numbers,
    Rendezvous,
)
from tests.observe.live.test_snapshot import JOB
from tests.test_launchers import SLURM
from tests.trainer.ranks import MemoryWords, RankOf, jax_words, rank_of, ranks, together
from tests.trust.in_process import StepClock

SECS = 240.0
SHORT_SECS = 1.0
"""How long a decision waits for ranks that never join; all others have to join within it."""


@pytest.fixture(params=["jax", "memory"])
def words(request: pytest.FixtureRequest) -> Iterator[KeyValues]:
    if request.param == "memory":
        yield MemoryWords()
        return
    with jax_words() as made:
        yield made


def joined(values: list[str]) -> str:
    return "+".join(values)


def all_decide(
    job: list[Rendezvous], judge: Callable[[list[str]], str] = joined, secs: float = SECS
) -> list[object]:
    return together(
        [lambda one=one: one.decide("vote", f"v{one.rank}", judge, secs) for one in job]
    )


def standing(words: KeyValues) -> dict[str, str]:
    """All words of the first decisions of a job of up to 64 ranks."""
    found: dict[str, str] = {}
    for number in range(64):
        answer = words.get(f"{ROOT}/{number}/answer")
        found |= {} if answer is None else {f"{number}/answer": answer}
        values = words.get_many(f"{ROOT}/{number}/values", [str(rank) for rank in range(64)])
        found |= {f"{number}/values/{name}": word for name, word in values.items()}
    return found


# The words themselves.


def test_a_word_is_put_once_and_never_changed(words: KeyValues) -> None:
    assert words.get("a/b") is None
    assert words.put_if_absent("a/b", "first")
    assert not words.put_if_absent("a/b", "second")
    assert words.get("a/b") == "first"


def test_words_are_listed_and_removed_by_whole_names(words: KeyValues) -> None:
    for key in ("a/1/x/0", "a/1/x/1", "a/1/y", "a/10/x/0"):
        words.put_if_absent(key, key)
    assert words.get_many("a/1/x", ["0", "1", "2"]) == {"0": "a/1/x/0", "1": "a/1/x/1"}
    assert words.get_many("a/1/x", ["1"]) == {"1": "a/1/x/1"}
    assert words.get_many("a/1/x", ["1", "0"]) == {"0": "a/1/x/0", "1": "a/1/x/1"}
    assert words.get_many("a/2", ["0"]) == {}
    words.delete("a/1/x", ["0", "1", "2"])
    assert words.get_many("a/1/x", ["0", "1"]) == {}
    assert words.get("a/1/y") == "a/1/y"
    words.delete("a/1", ["y"])
    words.delete("a/2", ["x"])
    assert words.get("a/1/y") is None
    assert words.get("a/10/x/0") == "a/10/x/0"


def test_a_service_that_has_ended_is_a_lost_process() -> None:
    with jax_words() as words:
        assert words.put_if_absent("a/b", "c")
    for call in (
        lambda: words.put_if_absent("a/d", "c"),
        lambda: words.get("a/b"),
        lambda: words.get_many("a", ["b"]),
        lambda: words.delete("a", ["b"]),
    ):
        with pytest.raises(errors.ProcessLostError, match="Rank 0's process holds it"):
            call()


# Decisions.


def test_rank_0_judges_all_values_in_the_order_of_ranks_and_all_are_answered(
    words: KeyValues,
) -> None:
    job = ranks(words, 12)
    judged: list[list[str]] = []

    def judge(values: list[str]) -> str:
        judged.append(values)
        return f"{len(values)} ü\n"

    assert all_decide(job, judge) == ["12 ü\n"] * 12
    assert judged == [[f"v{rank}" for rank in range(12)]]


def test_a_process_alone_judges_by_itself() -> None:
    alone = Rendezvous(OwnProcess(), SystemClock())
    assert alone.decide("vote", "v", joined, 0.0) == "v"
    with pytest.raises(errors.StorageError), alone.propagating_errors("read"):
        raise errors.StorageError("it is full")
    assert alone.decide("vote", "w", joined, 0.0) == "w"


def test_decisions_follow_each_other_and_leave_no_words_behind(words: KeyValues) -> None:
    job = ranks(words, 3)
    for index in range(40):
        assert all_decide(job) == ["v0+v1+v2"] * 3
        assert set(standing(words)) == {f"{index}/answer"}


def test_words_of_decisions_that_failed_are_removed_too(words: KeyValues) -> None:
    job = ranks(words, 3)
    for _ in range(5):
        job[1].fail_next("read", errors.StorageError("it is full"))
        others = together(
            [lambda one=one: one.decide("vote", "v", joined, SECS) for one in (job[0], job[2])]
        )
        assert {type(error) for error in others} == {errors.StorageError}
    all_decide(job)
    assert set(standing(words)) == {"5/answer"}


@pytest.mark.parametrize("missing", [[1], [0], [1, 2, 5]])
def test_ranks_that_never_come_are_named_on_all_others(
    words: KeyValues, missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_SECS", 2.0)
    there = [one for one in ranks(words, 6) if one.rank not in missing]
    told = all_decide(there, secs=SHORT_SECS)
    assert all(type(error) is errors.ProcessLostError for error in told)
    assert all(f"vote: {ranks_text(missing)} of 6 did not join" in str(error) for error in told)


def test_missing_ranks_are_named_with_their_hosts_and_how_long_they_are_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = StepClock()
    leader = Rendezvous(RankOf(0, 2, MemoryWords()), clock, Numbers(), launch_of(SLURM, {}))
    caplog.set_level("INFO", "holdfast")
    with pytest.raises(errors.ProcessLostError) as caught:
        leader.decide("open the run", "", joined, 600.0)
    # 600 s after 12:16:40.
    assert str(caught.value).startswith(
        "open the run: rank 1 (on node09) of 2 did not join within 600 s, since 12:16:40 UTC; see"
    )
    logged = [record.getMessage() for record in caplog.records]
    assert logged[0].startswith("open the run: waiting for rank 1 (on node09): 31 s")
    assert len(logged) == 5
    leader.reports.hosts = ("a", "b")
    leader.reports.ask = lambda: JOB
    with pytest.raises(errors.ProcessLostError, match=r"missing: rank 1 \(b: .*; the others: rank"):
        leader.decide("finish", "", joined, 600.0)


def test_no_rank_waits_beyond_its_bound() -> None:
    """In time that only the waiting moves, so that the bound is exact."""
    for rank in (0, 1):
        clock = StepClock()
        one = ranks(MemoryWords(), 3, clock)[rank]
        with pytest.raises(errors.ProcessLostError, match="did not join within"):
            one.decide("vote", "v", joined, 3600.0)
        bound_secs = 3600.0 + (GRACE_SECS if rank else LINGER_SECS)
        assert bound_secs <= clock.secs - StepClock.secs <= bound_secs + POLL_SECS_MAX


def test_waiting_for_an_hour_asks_at_most_about_once_a_second() -> None:
    words = MemoryWords()
    one = ranks(words, 3, StepClock())[1]
    with pytest.raises(errors.ProcessLostError):
        one.decide("vote", "v", joined, 3600.0)
    assert words.asked.total() < 4000


def test_a_rank_that_comes_late_is_told_and_the_next_decision_works(words: KeyValues) -> None:
    job = ranks(words, 3)
    early = all_decide(job[:2], secs=SHORT_SECS)
    (late,) = all_decide(job[2:])
    assert {type(error) for error in (*early, late)} == {errors.ProcessLostError}
    assert "rank 2 of 3 did not join" in str(late)
    assert all_decide(job) == ["v0+v1+v2"] * 3


def test_an_answer_is_never_given_after_a_rank_gave_up(words: KeyValues) -> None:
    """Else some would go on with what others think has failed."""
    job = ranks(words, 3)

    def judge(values: list[str]) -> str:
        # Meanwhile another rank's time is up.
        job[1]._entries.put_if_absent(f"{ROOT}/0/answer", '{"value":"late","rank":1,"error":"X"}')
        return "good"

    told = all_decide(job, judge)
    assert [type(error) for error in told] == [errors.HoldfastError] * 3
    assert [str(error) for error in told] == ["rank 1: late"] * 3


@pytest.mark.parametrize(
    "kind", [errors.NotARunError, errors.NewerFormatError, errors.OutOfSpaceError]
)
def test_what_the_judge_raises_every_rank_raises_as_that_class(
    words: KeyValues, kind: type[errors.HoldfastError]
) -> None:
    def judge(values: list[str]) -> str:
        raise kind("open \udcff: the reason")

    told = all_decide(ranks(words, 4), judge)
    assert [type(error) for error in told] == [kind] * 4
    assert all("the reason" in str(error) for error in told)
    assert str(told[3]).startswith("rank 0: ")


def test_a_bug_in_the_judge_is_raised_on_rank_0_and_told_to_the_others(words: KeyValues) -> None:
    def judge(values: list[str]) -> str:
        return str(1 // 0)

    first, second = all_decide(ranks(words, 2), judge)
    assert type(first) is ZeroDivisionError
    assert type(second) is errors.ProcessLostError
    assert "rank 0: vote: ZeroDivisionError" in str(second)


def test_what_ends_a_rank_before_a_decision_ends_it_for_all(words: KeyValues) -> None:
    job = ranks(words, 3)

    def failing() -> str:
        with job[1].propagating_errors("read"):
            raise errors.StructureMismatchError("no such array")
        return job[1].decide("vote", "v", joined, SECS)

    calls = [
        lambda: job[0].decide("vote", "v", joined, SECS),
        failing,
        lambda: job[2].decide("vote", "v", joined, SECS),
    ]
    told = together(calls)
    assert [type(error) for error in told] == [errors.StructureMismatchError] * 3
    assert [str(error) for error in told] == [
        "rank 1: no such array",
        "no such array",
        "rank 1: no such array",
    ]
    assert all_decide(job) == ["v0+v1+v2"] * 3


def test_trouble_that_one_rank_hears_of_ends_the_waiting_of_all(words: KeyValues) -> None:
    for hears in (0, 1):
        there = ranks(words, 3)[:2]

        def decide(one: Rendezvous, hears: int = hears) -> str:
            trouble = errors.ProcessLostError("rank 2 has ended") if one.rank == hears else None
            return one.decide("vote", "v", joined, SECS, lambda: trouble)

        told = together([lambda one=one: decide(one) for one in there])
        assert all(type(error) is errors.ProcessLostError for error in told)
        assert all("rank 2 has ended" in str(error) for error in told)
        words.delete(f"{ROOT}/0/values", ["0", "1"])
        words.delete(f"{ROOT}/0", ["answer"])


def test_a_rank_that_leaves_after_it_did_its_part_is_no_trouble(words: KeyValues) -> None:
    """The other's word comes between this rank's look and its hearing that the other has left."""

    def leaving(key: str, word: str) -> Callable[[], errors.HoldfastError]:
        def trouble() -> errors.HoldfastError:
            words.put_if_absent(f"{ROOT}/0/{key}", word)
            return errors.ProcessLostError("the other has ended")

        return trouble

    job = ranks(words, 2)
    other = leaving("values/1", '{"name":"vote","value":"v1"}')
    assert job[0].decide("vote", "v0", joined, SECS, other) == "v0+v1"
    words.delete(f"{ROOT}/0/values", ["0", "1"])
    words.delete(f"{ROOT}/0", ["answer"])
    leader = leaving("answer", '{"value":"good"}')
    assert job[1].decide("vote", "v1", joined, SECS, leader) == "good"


def test_processes_that_make_other_calls_are_told_so(words: KeyValues) -> None:
    job = ranks(words, 2)
    told = together(
        [lambda one=one: one.decide(f"do {one.rank}", "v", joined, SECS) for one in job]
    )
    assert [type(error) for error in told] == [errors.InvalidArgumentError] * 2
    assert all("rank 0 calls for 'do 0', and rank 1 for 'do 1'" in str(error) for error in told)


def test_a_second_process_of_one_rank_is_told_so(words: KeyValues) -> None:
    twins = [ranks(words, 3, StepClock())[1] for _ in range(2)]
    with pytest.raises(errors.ProcessLostError):
        twins[0].decide("vote", "mine", joined, 0.0)
    words.delete(f"{ROOT}/0", ["answer"])
    with pytest.raises(errors.ProcessLostError, match="rank 1 has already submitted another value"):
        twins[1].decide("vote", "other", joined, 0.0)


def test_rank_0_keeps_an_error_until_the_others_have_looked() -> None:
    """It may be about to end, and the words end with it."""
    clock = StepClock()
    words = MemoryWords()
    first = ranks(words, 2, clock)[0]
    at_secs: list[float] = []

    def judge(values: list[str]) -> str:
        at_secs.append(clock.secs)
        raise errors.StorageError("it is full")

    words.words[f"{ROOT}/0/values/1"] = '{"name":"vote","value":"v1"}'
    with pytest.raises(errors.StorageError):
        first.decide("vote", "v0", judge, SECS)
    assert clock.secs - at_secs[0] == LINGER_SECS > POLL_SECS_MAX
    first.fail_next("read", errors.StorageError("it is full"))
    assert clock.secs - at_secs[0] == 2 * LINGER_SECS


# Of 4,096 processes.


def test_rank_0_asks_for_all_values_at_once_and_the_others_for_one_word() -> None:
    count = 4096
    words = MemoryWords()
    for rank in range(1, count):
        words.words[f"{ROOT}/0/values/{rank}"] = f'{{"name":"vote","value":"v{rank}"}}'
    first = rank_of(words, 0, count)
    answer = first.decide("vote", "v0", lambda values: f"{len(values)} {values[4095]}", SECS)
    assert answer == "4096 v4095"
    assert words.asked == {"put_if_absent": 2, "get_many": 1, "delete": 1, "get": 1}
    words.asked.clear()
    last = rank_of(words, 4095, count)
    assert last.decide("vote", "v4095", joined, SECS) == answer
    assert words.asked == {"put_if_absent": 1, "get": 1}


def test_jax_s_service_takes_the_values_of_4096_processes() -> None:
    with jax_words() as words:
        assert isinstance(words, JaxKeyValues)
        for rank in range(1, 4096):
            said = f'{{"name":"vote","value":"{"x" * 600}"}}'
            assert words.put_if_absent(f"{ROOT}/0/values/{rank}", said)
        first = rank_of(words, 0, 4096)
        assert first.decide("vote", "", lambda v: str(sum(map(len, v))), SECS) == str(600 * 4095)
        assert set(standing(words)) == {"0/answer"}


def test_ranks_are_told_as_a_person_writes_them() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([7, 1, 2, 3]) == "ranks 1-3, 7"
    odd = range(1, 41, 2)
    assert ranks_text(odd) == f"ranks {', '.join(str(r) for r in odd[:10])} and 10 more"


def test_a_service_that_does_not_answer_is_waited_for_within_a_bound() -> None:
    """As PyTorch's store, whose calls block while the process that holds it is suspended."""
    answers = threading.Event()

    class Suspended(MemoryWords):
        def get(self, key: str) -> str | None:
            answers.wait(240)
            return super().get(key)

    entries = BoundedEntries(Suspended(), answer_secs=0.1)
    assert entries.put_if_absent("a", "b")
    with pytest.raises(errors.ProcessLostError, match=r"no answer for 0\.1 s.*suspended"):
        entries.get("a")
    with pytest.raises(errors.ProcessLostError, match="no answer"):
        entries.put_if_absent("c", "d")
    answers.set()
