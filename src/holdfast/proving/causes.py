"""The likely causes of a difference, each with its cure: a pure function of what was seen.

What is seen are the first checkpoint that differs, and what each process reported at its saves: the
states of the random generators that programs share, the epochs of samplers, and the loaders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.adapt.program_facts import LoaderFacts, ProgramFacts
from holdfast.comparison.differences import Comparison
from holdfast.proving.verdict import SavedRun

SMALL = 1e-2
"""Differences of numbers below this are taken for other rounding."""
TIMES_SECS = range(1_500_000_000, 4_000_000_000)
GENERATORS = {
    "python": ("Python's random", "random.seed(0)"),
    "numpy": ("NumPy's global generator", "numpy.random.seed(0)"),
    "torch": ("PyTorch's generator of the CPU", "torch.manual_seed(0)"),
    "cuda": ("PyTorch's generators of CUDA", "torch.cuda.manual_seed_all(0)"),
}
"""By name the generators that programs share, in words, and what gives them a seed."""


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
    def uses_torch(self) -> bool:
        """Whether the program has imported PyTorch, as far as is known."""
        return self.facts is not None and self.facts.is_deterministic is not None

    def differing(self, kind: Literal["streams", "epochs"]) -> dict[str, tuple[Any, Any]]:
        """Return the generators or samplers that differ at that step, each with both values."""
        differing = {}
        for rank, of_rank in self.a.saves.items():
            other = self.b.saves.get(rank, {}).get(self.step)
            if self.step in of_rank and other is not None:
                others = getattr(other, kind)
                for name, value in getattr(of_rank[self.step], kind).items():
                    if value != others.get(name):
                        differing[name] = value, others.get(name)
        return differing

    def drawn(self) -> list[str]:
        """Return the generators that differ and from which the program draws as it trains."""
        drawn = self.a.drawn_streams()
        return [name for name in self.differing("streams") if name in drawn]


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
_STREAM = Cause(
    "a stream's shuffle buffer",
    "the state has a stream of datasets, whose own state has nothing of what shuffle has read into "
    "its buffer",
    "read it again up to the step, with holdfast.data.Order(None, batch=…, shuffle=False)"
    ".replay(stream, start), or shuffle data with random access by an Order",
)


def _bytes(evidence: Evidence) -> Iterator[Cause]:
    differences = evidence.first.differences
    sides = [side for difference in differences for side in (difference.a, difference.b)]
    if all(d.kind == "value" for d in differences) and all(s[:2] in ("b'", 'b"') for s in sides):
        path = differences[0].name.partition("/")[0]
        yield Cause(
            "bytes that depend on time",
            f"nothing differs but bytes, as in {differences[0].name}: files of tf.data have what "
            "was read ahead",
            f"compare everything else, which follows from what they stand for: --without {path}",
        )


def _times(evidence: Evidence) -> Iterator[Cause]:
    for difference in evidence.first.differences:
        sides = difference.a, difference.b
        if difference.kind in ("value", "metric") and all(map(_is_time, sides)):
            yield Cause(
                "a time in the data",
                f"{difference.name} is a time: {difference.a} | {difference.b}",
                "keep times out of the state and of what the training computes",
            )


def _is_time(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return math.isfinite(number) and int(number) in TIMES_SECS


def _unseeded(evidence: Evidence) -> Iterator[Cause]:
    if drawn := evidence.drawn():
        yield Cause(
            "unseeded randomness",
            f"the program draws from {_listed(0, drawn)}, which differs at step {evidence.step} "
            "without any kill",
            f"call {_listed(1, drawn)} at the start of the program",
        )
    elif evidence.step == evidence.a.steps[0] and not [*_bytes(evidence), *_times(evidence)]:
        names = [*evidence.differing("streams")]
        yield Cause(
            "unseeded randomness from the start",
            f"the first checkpoint, of step {evidence.step}, differs without any kill",
            f"give a seed to what the program draws from{': ' * bool(names)}{_listed(1, names)}; "
            "to generators of its own too: numpy.random.default_rng(0), "
            "torch.Generator().manual_seed(0), jax.random.key(0)",
        )


def _listed(part: int, names: Sequence[str]) -> str:
    return ", ".join(GENERATORS[name][part] for name in names)


def _kernels(evidence: Evidence) -> Iterator[Cause]:
    sizes = [
        difference.largest
        for difference in evidence.first.differences
        if difference.kind in ("elements", "value", "metric")
    ]
    is_small = bool(sizes) and all(size is not None and size < SMALL for size in sizes)
    if is_small and evidence.step != evidence.a.steps[0] and not evidence.drawn():
        advice = "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        if evidence.uses_torch:
            advice = "torch.use_deterministic_algorithms(True)"
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
    """Yield what the first loader for which there is a cause points to."""
    loaders = evidence.facts.loaders if evidence.facts is not None else ()
    has_torch_stream = "torch" in evidence.differing("streams")
    of_torch = [_of_torch(loader, has_torch_stream) for loader in loaders if loader.is_torch]
    streams = [_STREAM for loader in loaders if loader.is_stream]
    left_out = [_left_out(loader) for loader in loaders if not loader.in_state]
    yield from [cause for cause in (*of_torch, *streams, *left_out) if cause is not None][:1]


def _of_torch(loader: LoaderFacts, has_torch_stream: bool) -> Cause | None:
    if loader.is_exact:
        return None
    if loader.is_prepared:
        return Cause(
            "a prepared loader's epoch",
            f"{loader.name} of accelerate shuffles by the number of its epoch, which no state has",
            "iterate over holdfast.interop.trainers.accelerate.PreparedLoader(loader), and put "
            "that into the state",
        )
    if not loader.has_generator and has_torch_stream:
        return Cause(
            "a loader without generator=",
            f"{loader.name} has no generator: each of its iterators, also the one after a restart, "
            "draws a seed from the generator of all",
            "use a StatefulDataLoader of torchdata with generator=torch.Generator().manual_seed(0),"
            " iterate over holdfast.torch.ExactLoader(loader), and put that into the state",
        )
    if loader.in_state and loader.has_generator:
        return Cause(
            "a loader's generator left out",
            f"{loader.name} does not save the generator from which the orders of later epochs come",
            "iterate over holdfast.torch.ExactLoader(loader), and put that into the state",
        )
    return None


def _left_out(loader: LoaderFacts) -> Cause:
    if loader.has_state:
        return Cause(
            "an iterator left out",
            f"{loader.name} has a state, and is no leaf of the saved one",
            'put it into the state: {"model": model, …, "data": loader}',
        )
    return Cause(
        "a loader without a state",
        f"{loader.name} begins its epoch anew after a restart",
        "use a StatefulDataLoader of torchdata, which takes the same arguments, with "
        "generator=torch.Generator().manual_seed(0), iterate over "
        "holdfast.torch.ExactLoader(loader), and put that into the state",
    )


def _samplers(evidence: Evidence) -> Iterator[Cause]:
    for name, (one, other) in [*evidence.differing("epochs").items()][:1]:
        yield Cause(
            "a sampler's epoch",
            f"at step {evidence.step} the epochs differ: {name.partition(' ')[0]} {one} | {other}",
            "set it from the step after a restart: sampler.set_epoch(epoch); or put the object "
            "that counts it into the state",
        )


def _streams(evidence: Evidence) -> Iterator[Cause]:
    if evidence.facts is not None and evidence.facts.random_paths:
        return
    cure = (
        "draw from a generator whose state is in the saved one, such as its bit_generator.state as "
        "a value, or from jax.random keys"
    )
    if evidence.uses_torch:
        cure = 'put holdfast.torch.RandomState() into the state: {…, "rng": RandomState()}'
    for name in evidence.drawn()[:1]:
        yield Cause(
            "a random state that is not in the state",
            f"the program draws from {GENERATORS[name][0]}, which differs at step {evidence.step} "
            "after a restart",
            cure,
        )


def _workers(evidence: Evidence) -> Iterator[Cause]:
    loaders = evidence.facts.loaders if evidence.facts is not None else ()
    busy = [one for one in loaders if one.is_torch and one.worker_count and one.in_state]
    for loader in busy[:1]:
        yield Cause(
            "random augmentation in loader workers",
            f"{loader.name} has {loader.worker_count} workers, whose generators no state has",
            "derive the random numbers of a sample from its index and the epoch, as "
            "numpy.random.default_rng((seed, epoch, index))",
        )


_OF_PROGRAM = (_bytes, _times, _unseeded, _kernels)
_OF_RESUME = (_bytes, _times, _types, _loaders, _samplers, _streams, _workers)
