"""The likely causes of a difference, each with its cure: a pure function of what was seen.

What is seen are the first checkpoint that differs, and what each process reported at its saves: the
states of the random generators that programs share, the epochs of samplers, and the loaders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.adapt.program_facts import LoaderFacts, ProgramFacts
from holdfast.comparison.differences import Comparison
from holdfast.proving.verdict import SavedRun
from holdfast.trainer.opening.proof import ProofSave

SMALL = 1e-2
"""Differences of numbers below this are taken for other rounding."""
TIMES_SECS = range(1_500_000_000, 4_000_000_000)
GENERATORS = {
    "python": "Python's random",
    "numpy": "NumPy's global generator",
    "torch": "PyTorch's generator of the CPU",
    "cuda": "PyTorch's generators of CUDA",
}
SEEDS = {
    "python": "random.seed(0)",
    "numpy": "numpy.random.seed(0)",
    "torch": "torch.manual_seed(0)",
    "cuda": "torch.cuda.manual_seed_all(0)",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause: its short name, what points to it, and what to do."""

    name: str
    reason: str
    cure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a difference.

    Attributes:
        a: the uninterrupted run.
        b: the run that differs from it, with kills or repeated.
        first: the first checkpoint that differs.
        step: its step.
        is_repeat: whether the uninterrupted program differs from itself.
    """

    a: SavedRun
    b: SavedRun
    first: Comparison
    step: int
    is_repeat: bool

    @property
    def facts(self) -> ProgramFacts | None:
        """What is known of the program."""
        return next((save.facts for save in self.a.first_saves if save.facts is not None), None)

    @property
    def is_from_start(self) -> bool:
        """Whether the first checkpoint of all differs already."""
        return self.step == self.a.steps[0]

    def drawn(self) -> set[str]:
        """Return the generators that the uninterrupted program draws from as it trains."""
        return self.a.drawn_streams()

    def differing_streams(self) -> list[str]:
        """Return the generators whose states differ at that step."""
        return [
            name
            for one, other in self._pairs()
            for name in one.streams
            if one.streams[name] != other.streams.get(name)
        ]

    def differing_epochs(self) -> list[str]:
        """Return the samplers whose epochs differ at that step, each with both."""
        return [
            f"{name.partition(' ')[0]} {one.epochs[name]} | {other.epochs.get(name)}"
            for one, other in self._pairs()
            for name in one.epochs
            if one.epochs[name] != other.epochs.get(name)
        ]

    def _pairs(self) -> Iterator[tuple[ProofSave, ProofSave]]:
        for rank, of_rank in self.a.saves.items():
            other = self.b.saves.get(rank, {}).get(self.step)
            if self.step in of_rank and other is not None:
                yield of_rank[self.step], other


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Return the causes that what was seen points to, the likeliest first; never empty."""
    finders = _OF_PROGRAM if evidence.is_repeat else _OF_RESUME
    causes = [cause for find in finders for cause in find(evidence)]
    return causes or [_UNKNOWN_PROGRAM if evidence.is_repeat else _UNKNOWN_RESUME]


_UNKNOWN_PROGRAM = Cause(
    "the program is not deterministic",
    "two runs without a kill differ, and nothing that was seen says why",
    "look for generators without a seed (numpy.random.default_rng(), torch.Generator()), the order "
    "of sets and files, threads that finish in any order, and times",
)
_UNKNOWN_RESUME = Cause(
    "something is left out of the state",
    "the program repeats itself without a kill, so that what differs was lost in a restart",
    "put what the training changes into the state: iterators, counters, averages, caches, "
    "generators of its own",
)


def _times(evidence: Evidence) -> Iterator[Cause]:
    for difference in evidence.first.differences:
        if difference.kind in ("value", "metric"):
            numbers = [_number(text) for text in (difference.a, difference.b)]
            if all(number is not None and int(number) in TIMES_SECS for number in numbers):
                yield Cause(
                    "a time in the data",
                    f"{difference.name} is a time: {difference.a} | {difference.b}",
                    "keep times out of the state and of what the training computes",
                )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _unseeded(evidence: Evidence) -> Iterator[Cause]:
    names = evidence.differing_streams()
    drawn = [name for name in names if name in evidence.drawn()]
    if drawn:
        yield Cause(
            "unseeded randomness",
            f"the program draws from {_listed(GENERATORS, drawn)}, which differs at step "
            f"{evidence.step} without any kill",
            f"call {_listed(SEEDS, drawn)} at the start of the program",
        )
    elif evidence.is_from_start and not [*_times(evidence)]:
        yield Cause(
            "unseeded randomness from the start",
            f"the first checkpoint, of step {evidence.step}, differs without any kill",
            "give a seed to what the program draws from"
            + (f": {_listed(SEEDS, names)}" if names else "")
            + "; to generators of its own too: numpy.random.default_rng(0), "
            "torch.Generator().manual_seed(0), jax.random.key(0)",
        )


def _listed(texts: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(texts[name] for name in names)


def _kernels(evidence: Evidence) -> Iterator[Cause]:
    sizes = [
        difference.largest
        for difference in evidence.first.differences
        if difference.kind in ("elements", "value", "metric")
    ]
    is_small = bool(sizes) and all(size is not None and size < SMALL for size in sizes)
    facts = evidence.facts
    is_drawn = not set(evidence.differing_streams()).isdisjoint(evidence.drawn())
    if is_small and not evidence.is_from_start and not is_drawn:
        advice = "torch.use_deterministic_algorithms(True)"
        if facts is None or facts.is_deterministic is None:
            advice = "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        yield Cause(
            "a nondeterministic kernel",
            f"the program differs from itself at step {evidence.step}, by little",
            f"choose deterministic kernels ({advice}), or accept the difference: a restart "
            "changes no more than a repetition does",
        )


def _types(evidence: Evidence) -> Iterator[Cause]:
    for difference in evidence.first.differences:
        if difference.kind == "type" and difference.a and difference.b:
            is_weak = "weak type" in difference.a + difference.b
            yield Cause(
                "weak types" if is_weak else "another type after a restart",
                f"{difference.name} is {difference.a} without a kill and {difference.b} after one",
                "give arrays of the initial state their dtype, as jnp.asarray(1.0, jnp.float32), "
                "and do not replace restored leaves by Python numbers",
            )
            return


def _loaders(evidence: Evidence) -> Iterator[Cause]:
    facts = evidence.facts
    if facts is None:
        return
    streams = evidence.differing_streams()
    loaders = [loader for loader in facts.loaders if loader.is_torch]
    for loader in loaders:
        if not loader.has_generator and "torch" in streams:
            yield Cause(
                "a loader without generator=",
                f"{loader.name} has no generator: each of its iterators, also the one after a "
                "restart, draws a seed from the generator of all",
                "use a StatefulDataLoader of torchdata with generator=torch.Generator()."
                "manual_seed(0), iterate over holdfast.torch.ExactLoader(loader), and put that "
                "into the state",
            )
            return
        if loader.in_state and not loader.is_exact and loader.has_generator:
            yield Cause(
                "a loader's generator left out",
                f"{loader.name} does not save the generator from which the orders of later epochs "
                "come",
                "iterate over holdfast.torch.ExactLoader(loader), and put that into the state",
            )
            return
    yield from _left_out(facts.loaders)


def _left_out(loaders: Sequence[LoaderFacts]) -> Iterator[Cause]:
    for loader in loaders:
        if loader.in_state:
            continue
        if loader.has_state:
            yield Cause(
                "an iterator left out",
                f"{loader.name} has a state, and is no leaf of the saved one",
                'put it into the state: {"model": model, …, "data": loader}',
            )
        else:
            yield Cause(
                "a loader without a state",
                f"{loader.name} begins its epoch anew after a restart",
                "use a StatefulDataLoader of torchdata, which takes the same arguments, and put it "
                "into the state; or save at the ends of epochs alone",
            )
        return


def _samplers(evidence: Evidence) -> Iterator[Cause]:
    for text in evidence.differing_epochs():
        yield Cause(
            "a sampler's epoch",
            f"at step {evidence.step} the epochs differ: {text}",
            "set it from the step after a restart: sampler.set_epoch(epoch); or put the object "
            "that counts it into the state",
        )
        return


def _streams(evidence: Evidence) -> Iterator[Cause]:
    facts, drawn = evidence.facts, evidence.drawn()
    is_saved = facts is not None and facts.has_random_state
    for name in evidence.differing_streams():
        if name in drawn and not is_saved:
            cure = 'put holdfast.torch.RandomState() into the state: {…, "rng": RandomState()}'
            if facts is None or facts.is_deterministic is None:
                cure = "draw from a generator whose state is in the saved one, such as its "
                cure += "bit_generator.state as a value, or from jax.random keys"
            yield Cause(
                "a random state that is not in the state",
                f"the program draws from {GENERATORS[name]}, which differs at step {evidence.step} "
                "after a restart",
                cure,
            )
            return


def _workers(evidence: Evidence) -> Iterator[Cause]:
    facts = evidence.facts
    for loader in facts.loaders if facts is not None else ():
        if loader.is_torch and loader.worker_count and loader.in_state:
            yield Cause(
                "random augmentation in loader workers",
                f"{loader.name} has {loader.worker_count} workers, whose generators no state has",
                "derive the random numbers of a sample from its index and the epoch, as "
                "numpy.random.default_rng((seed, epoch, index))",
            )
            return


_OF_PROGRAM = (_times, _unseeded, _kernels)
_OF_RESUME = (_times, _types, _loaders, _samplers, _streams, _workers)


def cause_documents(causes: Sequence[Cause]) -> list[Mapping[str, str]]:
    """Return causes as JSON shows them."""
    return [{"name": c.name, "reason": c.reason, "cure": c.cure} for c in causes]
