"""Compare what two runs of one program have saved: all checkpoints of equal steps, in their order.

The first step that differs is the last one that is compared: what follows from it differs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.comparison.differences import Comparison, compare
from holdfast.comparison.places import run_contents
from holdfast.proving.program import NotComparableError
from holdfast.trainer.opening.proof import ProofSave, read_openings, read_saves
from holdfast.trainer.run import open_run


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

    def random_paths(self) -> set[str]:
        """Return the names in the state of the states of these generators."""
        facts = [save.facts for save in self.first_saves if save.facts is not None]
        return {path for of_rank in facts for path in of_rank.random_paths}

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
            f"prove: {name}: expected a program that opens a holdfast.CheckpointManager, found "
            "none when it ended; what it saves otherwise is not compared"
        )
    if len(directories) > 1:
        raise NotComparableError(
            f"prove: {name}: expected one manager, found managers of "
            f"{len(directories)} directories: {', '.join(sorted(directories.values()))}; prove a "
            "program that has one, or give each start the same directory"
        )
    (directory,) = directories
    with open_run(directory) as run:
        steps = tuple(run.all_steps())
    if not steps:
        raise NotComparableError(f"prove: {name}: expected a checkpoint, found none; does it save?")
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
    """

    steps: tuple[int, ...]
    compared: tuple[Comparison, ...]

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
        }


def judge(a: SavedRun, b: SavedRun, last_step: int | None = None) -> Verdict:
    """Compare the checkpoints of equal steps, up to the first one that differs.

    Raises:
        NotComparableError: they have no step in common.
        HoldfastError: a checkpoint cannot be read.
    """
    common = sorted(set(a.steps) & set(b.steps))
    common = [step for step in common if last_step is None or step <= last_step]
    if not common:
        raise NotComparableError(
            f"prove: expected checkpoints of equal steps, found steps {_range(a.steps)} and "
            f"{_range(b.steps)}; does the program resume?"
        )
    compared = list[Comparison]()
    for step in common:
        comparison = compare(run_contents(a.directory, step), run_contents(b.directory, step))
        compared.append(without_undrawn(comparison, a, b))
        if not compared[-1].is_equal:
            break
    return Verdict(tuple(common[: len(compared)]), tuple(compared))


def without_undrawn(comparison: Comparison, a: SavedRun, b: SavedRun) -> Comparison:
    """Leave out the states of generators that the program has in its state and never draws from.

    Python and NumPy seed theirs differently in each process, so that they always differ.
    """
    drawn = a.drawn_streams() | b.drawn_streams()
    starts = tuple(
        f"{path}/{stream}/"
        for path in a.random_paths()
        for stream in ("python", "numpy")
        if stream not in drawn
    )
    kept = tuple(d for d in comparison.differences if not f"{d.name}/".startswith(starts))
    if kept == comparison.differences:
        return comparison
    reason = "states of generators that the program never draws from"
    return replace(comparison, differences=kept, left_out=(*comparison.left_out, reason))


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
