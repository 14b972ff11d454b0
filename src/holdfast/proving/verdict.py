"""Compare what two runs of one program have saved: all checkpoints of equal steps, in their order.

The first step that differs is the last one that is compared: what follows from it differs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.adapt.program_facts import ProgramFacts
from holdfast.comparison.contents import Contents
from holdfast.comparison.differences import Comparison, compare
from holdfast.comparison.places import run_contents
from holdfast.proving.program import NotComparableError
from holdfast.trainer.opening.proof import ProofSave, read_openings, read_saves
from holdfast.trainer.run import open_run

STEPS_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What one run of the program has left.

    Attributes:
        directory: the run that it has written.
        steps: the steps of its checkpoints.
        saves: what each rank knew at the last save of each step.
    """

    directory: str
    steps: tuple[int, ...]
    saves: dict[int, dict[int, ProofSave]]

    def drawn_streams(self) -> set[str]:
        """Return the generators that all programs share and this one draws from as it trains."""
        names: set[str] = set()
        for of_rank in self.saves.values():
            streams = [save.streams for save in of_rank.values()]
            for name in {name for of_step in streams for name in of_step}:
                if len({of_step.get(name) for of_step in streams}) > 1:
                    names.add(name)
        return names

    @property
    def facts(self) -> list[ProgramFacts]:
        """What each rank has reported of the program."""
        return [save.facts for save in self.first_saves if save.facts is not None]

    @property
    def first_saves(self) -> list[ProofSave]:
        """The first report of each rank."""
        return [next(iter(of_rank.values())) for of_rank in self.saves.values() if of_rank]


def read_run(folder: Path, name: str) -> SavedRun:
    """Return what a run of the program has left in its folder.

    Raises:
        NotComparableError: it has opened no manager, or two; or it has saved nothing.
    """
    openings = read_openings(folder)
    directories = {opening.directory: opening.place for opening in openings}
    if not directories:
        raise NotComparableError(
            f"{name}: expected a program that opens a holdfast.CheckpointManager, found "
            "none when it ended; what it saves otherwise is not compared"
        )
    if len(directories) > 1:
        raise NotComparableError(
            f"{name}: expected one manager, found managers of "
            f"{len(directories)} directories: {', '.join(sorted(directories.values()))}; prove a "
            "program that has one, or give each start the same directory"
        )
    (directory,) = directories
    with open_run(directory) as run:
        steps = tuple(run.all_steps())
    if not steps:
        raise NotComparableError(f"{name}: expected a checkpoint, found none; does it save?")
    saves = {
        rank: {save.step: save for save in of_rank} for rank, of_rank in read_saves(folder).items()
    }
    return SavedRun(directory=directory, steps=steps, saves=saves)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing two runs of the program.

    Attributes:
        steps: the steps that were compared, ascending; the last one differs if one does.
        compared: the comparison of each step.
        left_out: what was not compared, and why, a line each.
    """

    steps: tuple[int, ...]
    compared: tuple[Comparison, ...]
    left_out: tuple[str, ...] = ()

    @property
    def first(self) -> Comparison | None:
        """The comparison of the first step that differs; None: none does."""
        return None if self.is_equal else self.compared[-1]

    @property
    def is_equal(self) -> bool:
        """Whether no step differs."""
        return self.compared[-1].is_equal

    @property
    def document(self) -> dict[str, Any]:
        """What was compared, as JSON shows it."""
        return {
            "steps": list(self.steps),
            "arrays_per_step": self.compared[-1].array_count,
            "compared_bytes": sum(comparison.array_bytes for comparison in self.compared),
            "values": sum(comparison.value_count for comparison in self.compared),
            "metrics": sum(comparison.metric_count for comparison in self.compared),
            "not_compared": list(self.left_out),
        }


def judge(
    a: SavedRun, b: SavedRun, last_step: int | None = None, without: Sequence[str] = ()
) -> Verdict:
    """Compare the checkpoints of equal steps, up to the first one that differs.

    Args:
        a: the one run.
        b: the other one.
        last_step: the last step to compare; None: the last one that both have.
        without: the names of entries that are not compared, with all below them.

    Raises:
        NotComparableError: they have no step in common, or nothing else to compare.
        HoldfastError: a checkpoint cannot be read.
    """
    common = sorted(set(a.steps) & set(b.steps))
    common = [step for step in common if last_step is None or step <= last_step]
    if not common:
        raise NotComparableError(
            f"expected checkpoints of equal steps, found steps {_range(a.steps)} and "
            f"{_range(b.steps)}; does the program resume?"
        )
    reasons = uncompared(a, b, without)
    left_out, lacking = set[str](), dict[str, list[int]]()
    compared = list[Comparison]()
    for step in common:
        pair = [run_contents(run.directory, step) for run in (a, b)]
        left_out |= {name for name in reasons for side in pair if side.has(name)}
        for name in pair[0].metrics.keys() ^ pair[1].metrics.keys():
            lacking.setdefault(name, []).append(step)
        comparison = compare(*_with_equal_metrics(pair, [*reasons]))
        if not (comparison.has_common or comparison.differences):
            text = f"expected something to compare at step {step}, found nothing"
            raise NotComparableError(
                f"{text} without {', '.join(sorted(left_out))}" if left_out else text
            )
        compared.append(comparison)
        if not comparison.is_equal:
            break
    named = [f"{name}: {reasons[name]}" for name in reasons if name in left_out]
    named += dict.fromkeys(reason for comparison in compared for reason in comparison.left_out)
    named += [f"metric {name}: {_lacking_text(lacking[name])}" for name in sorted(lacking)]
    return Verdict(tuple(common[: len(compared)]), tuple(compared), tuple(named))


def _with_equal_metrics(pair: Sequence[Contents], left_out: Sequence[str]) -> list[Contents]:
    """Return both sides with the metrics that both have, and without what is left out.

    Which call has saved a step, `save(metrics=...)` or `finish`, says nothing of what was computed.
    """
    shared = pair[0].metrics.keys() & pair[1].metrics.keys()
    return [
        replace(
            side.without(left_out),
            metrics={name: number for name, number in side.metrics.items() if name in shared},
        )
        for side in pair
    ]


def _lacking_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:STEPS_SHOWN_MAX]))
    more = f" and {len(steps) - STEPS_SHOWN_MAX} more" if len(steps) > STEPS_SHOWN_MAX else ""
    return f"one of the two runs saved step{'s' * (len(steps) > 1)} {shown}{more} without it"


def uncompared(a: SavedRun, b: SavedRun, without: Sequence[str]) -> dict[str, str]:
    """Return the names of entries that are not compared, and why.

    Python and NumPy seed their generators differently in each process: they always differ if the
    program does not seed them, which does not matter if it does not draw from them either.
    """
    drawn = a.drawn_streams() | b.drawn_streams()
    reasons = {name.strip("/"): "left out with --without" for name in without}
    for facts in (*a.facts, *b.facts):
        reasons |= dict.fromkeys(facts.time_paths, "durations, which differ in equal runs")
        reasons |= {
            f"{path}/{stream}": "the program never draws from this generator"
            for path in facts.random_paths
            for stream in ("python", "numpy")
            if stream not in drawn
        }
    return reasons


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
