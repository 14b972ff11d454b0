"""Which causes follow from what was observed: a pure function."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.adapt.program_facts import LoaderFacts, ProgramFacts
from holdfast.comparison.differences import Comparison, Difference
from holdfast.proving.causes import Cause, Evidence, likely_causes
from holdfast.proving.verdict import SavedRun, uncompared
from holdfast.trainer.opening.proof import ProofSave

STEPS = (0, 1, 2, 3)
WEIGHTS = Difference(name="w", kind="elements", count=1, size=2, largest=0.5)


def loader(**facts: Any) -> LoaderFacts:
    return LoaderFacts(
        **{"name": "StatefulDataLoader", "in_state": True, "has_state": True, "is_torch": True}
        | facts
    )


def facts(*loaders: LoaderFacts, random_paths: tuple[str, ...] = (), torch: bool = True) -> Any:
    return ProgramFacts(
        random_paths=random_paths,
        loaders=loaders,
        is_deterministic=False if torch else None,
    )


def run(of: ProgramFacts | None, epochs: dict | None = None, **streams: str) -> SavedRun:
    """A run whose streams have one character for each step."""
    saves = {
        step: ProofSave(
            step=step,
            streams={name: text[step] for name, text in streams.items()},
            epochs={name: numbers[step] for name, numbers in (epochs or {}).items()},
            facts=of if step == 0 else None,
        )
        for step in STEPS
    }
    return SavedRun(directory="d", steps=STEPS, saves={0: saves})


def compared(*differences: Difference) -> Comparison:
    return Comparison(a="A", b="B", differences=differences or (WEIGHTS,))


def causes(
    a: SavedRun, b: SavedRun, *differences: Difference, step: int = 2, is_repeat: bool = False
) -> list[Cause]:
    evidence = Evidence(a=a, b=b, first=compared(*differences), step=step, is_repeat=is_repeat)
    return likely_causes(evidence)


def name_of(found: list[Cause]) -> str:
    return found[0].name


def test_a_loader_without_a_generator_is_named_where_torch_differs() -> None:
    of = facts(loader(), random_paths=("rng",))
    (cause,) = causes(run(of, torch="abcd"), run(of, torch="abxy"))
    assert cause.name == "a loader without generator="
    assert "ExactLoader" in cause.cure


def test_a_generator_that_no_state_has_is_named_where_nothing_else_differs() -> None:
    of = facts(loader(has_generator=True), random_paths=("rng",))
    assert name_of(causes(run(of, torch="abcd"), run(of, torch="abcd"))) == (
        "a loader's generator left out"
    )
    exact = facts(loader(has_generator=True, is_exact=True), random_paths=("rng",))
    assert name_of(causes(run(exact, torch="abcd"), run(exact, torch="abcd"))) == (
        "something is left out of the state"
    )


def test_a_loader_of_accelerate_is_named_unless_it_is_wrapped() -> None:
    of = facts(loader(name="DataLoaderShard", is_prepared=True), random_paths=("rng",))
    (cause,) = causes(run(of, torch="abcd"), run(of, torch="abxy"))
    assert cause.name == "a prepared loader's epoch"
    assert "PreparedLoader(loader)" in cause.cure
    wrapped = facts(loader(is_prepared=True, is_exact=True), random_paths=("rng",))
    assert name_of(causes(run(wrapped, torch="abcd"), run(wrapped, torch="abxy"))) == (
        "something is left out of the state"
    )


def test_loaders_and_iterators_that_are_left_out_are_named() -> None:
    stateful = facts(loader(in_state=False, has_generator=True))
    assert name_of(causes(run(stateful), run(stateful))) == "an iterator left out"
    plain = facts(loader(name="DataLoader", in_state=False, has_state=False, has_generator=True))
    assert name_of(causes(run(plain), run(plain))) == "a loader without a state"
    grain = facts(LoaderFacts(name="GrainIterator", in_state=False, has_state=True), torch=False)
    assert name_of(causes(run(grain), run(grain))) == "an iterator left out"


@pytest.mark.parametrize(
    ("stream", "torch", "cure"),
    [
        ("numpy", True, "RandomState()"),
        ("numpy", False, "bit_generator.state"),
        ("python", True, "R"),
    ],
)
def test_a_random_state_is_named_only_if_the_program_draws_from_it(
    stream: str, torch: bool, cure: str
) -> None:
    of = facts(torch=torch)
    (cause,) = causes(run(of, **{stream: "abcd"}), run(of, **{stream: "abxy"}))
    assert cause.name == "a random state that is not in the state"
    assert cure in cause.cure
    undrawn = causes(run(of, **{stream: "aaaa"}), run(of, **{stream: "bbbb"}))
    assert name_of(undrawn) == "something is left out of the state"


def test_a_samplers_epoch_is_named_with_both() -> None:
    of = facts()
    a = run(of, {"EpochSampler.epoch 0": (0, 0, 1, 1)})
    b = run(of, {"EpochSampler.epoch 0": (0, 0, 0, 0)})
    (cause,) = causes(a, b)
    assert cause.name == "a sampler's epoch"
    assert "EpochSampler.epoch 1 | 0" in cause.reason


def test_weak_types_are_named() -> None:
    difference = Difference(name="lr", kind="type", a="float32 (), weak type", b="float32 ()")
    assert name_of(causes(run(None), run(None), difference)) == "weak types"


def test_workers_are_named_where_everything_else_is_in_the_state() -> None:
    of = facts(loader(has_generator=True, is_exact=True, worker_count=2), random_paths=("rng",))
    assert name_of(causes(run(of, torch="abcd"), run(of, torch="abcd"))) == (
        "random augmentation in loader workers"
    )


def test_a_program_that_differs_from_itself_is_told_by_when_and_how_much() -> None:
    of = facts()
    same, other = run(of, numpy="abcd", python="kkkk"), run(of, numpy="abcd", python="llll")
    tiny = Difference(name="w", kind="elements", count=1, size=2, largest=1e-6)
    assert name_of(causes(same, other, tiny, is_repeat=True)) == "a nondeterministic kernel"
    assert name_of(causes(same, other, is_repeat=True)) == "the program is not deterministic"
    start = causes(same, other, step=0, is_repeat=True)
    assert name_of(start) == "unseeded randomness from the start"
    drawn = causes(run(of, numpy="abcd"), run(of, numpy="wxyz"), is_repeat=True)
    assert name_of(drawn) == "unseeded randomness"
    assert "numpy.random.seed(0)" in drawn[0].cure
    time = Difference(name="now", kind="value", a="1790000000.5", b="1790000003.25", largest=2.75)
    for step in (0, 2):
        (cause,) = causes(same, other, time, step=step, is_repeat=True)
        assert cause.name == "a time in the data"


def test_generators_that_are_never_drawn_from_durations_and_what_is_named_are_not_compared() -> (
    None
):
    # Python and NumPy seed theirs differently in each process.
    of = replace(facts(random_paths=("rng",)), time_paths=("trainer/durations",))
    undrawn = run(of, python="aaaa", numpy="aaaa", torch="aaaa")
    names = ["rng/python", "rng/numpy", "trainer/durations"]
    assert sorted(uncompared(undrawn, undrawn, ())) == sorted(names)
    drawn = run(of, python="abcd", numpy="aaaa", torch="aaaa")
    assert sorted(uncompared(undrawn, drawn, ["data/"])) == ["data", *names[1:]]


def test_bytes_alone_are_left_out_of_the_comparison() -> None:
    same = run(facts(torch=False))
    files = Difference(name="data/position.index", kind="value", a="b'\\x00'", b="b'\\x01'")
    for step, is_repeat in [(0, True), (2, True), (2, False)]:
        found = causes(same, same, files, step=step, is_repeat=is_repeat)
        assert name_of(found) == "bytes that depend on time"
        assert "--without data" in found[0].cure
    assert name_of(causes(same, same, files, WEIGHTS)) == "something is left out of the state"


def test_a_stream_in_the_state_may_have_lost_its_buffer() -> None:
    of = facts(loader(name="IterableDataset", is_torch=False, is_stream=True), torch=False)
    assert name_of(causes(run(of), run(of))) == "a stream's shuffle buffer"
