"""Prove that a program's training is the same with kills as without: the sequence of its runs.

1. The program runs uninterrupted.
2. It runs again, and is killed and restarted at seeded steps.
3. If both differ, it runs uninterrupted once more: a program that differs from itself is not
   deterministic, and a restart is not to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from holdfast.proving.causes import Cause, Evidence, likely_causes
from holdfast.proving.plan import choose_kills
from holdfast.proving.program import (
    Execution,
    Kill,
    NotComparableError,
    ProgramRun,
    ProgramRunner,
)
from holdfast.proving.verdict import SavedRun, Verdict, judge, read_run
from holdfast.proving.written_files import changed, files_below
from holdfast.quantities import counted
from holdfast.trainer.opening.proof import ProofOrder

NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRequest:
    """What is to be proved.

    Attributes:
        kill_count: how often it is killed.
        seed: chooses the steps and kinds of the kills.
        last_step: the last step to compare, after which the program is ended; None: its own end.
        every: the distance of the compared steps; None: it grows with the step.
        without: the names in the state that are not compared, with all below them.
    """

    kill_count: int
    seed: int
    last_step: int | None = None
    every: int | None = None
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result.

    Attributes:
        request: what was asked.
        verdict: how the run with kills compares with the uninterrupted one; if the program differs
            from itself, how the repeated one does.
        is_repeat: whether the program differs from itself without any kill.
        kills: the kills, each with the step before whose save it was done.
        rank_count: how many processes the program has.
        causes: the likely causes of a difference.
        written: files in the working directory that changed while the program ran.
        directories: the two runs that were compared.
    """

    request: ProofRequest
    verdict: Verdict
    is_repeat: bool
    kills: tuple[tuple[Kill, int], ...]
    rank_count: int
    causes: tuple[Cause, ...]
    written: tuple[str, ...]
    directories: tuple[str, str]

    @property
    def document(self) -> dict[str, object]:
        """The result as JSON shows it."""
        verdict, first = self.verdict, self.verdict.first
        return {
            "identical": verdict.is_equal,
            "deterministic": not self.is_repeat,
            **verdict.document,
            "processes": self.rank_count,
            "seed": self.request.seed,
            "kills": [
                {"step": step, "kind": kill.kind.name.lower(), "rank": kill.rank}
                for kill, step in self.kills
            ],
            "first_difference": None
            if first is None
            else {"step": verdict.steps[-1], "differences": first.documents},
            "causes": [asdict(cause) for cause in self.causes],
            "written_files": list(self.written),
            "directories": list(self.directories),
        }


def prove(request: ProofRequest, execution: Execution) -> Proof:
    """Run the program without and with kills, and compare.

    Raises:
        NotComparableError: the program fails by itself, hangs, opens no manager or two, has too few
            steps or ends before the first kill.
        CommandNotRunError: it cannot be started.
        HoldfastError: what it has saved cannot be read.
    """
    root, note = execution.root, execution.note
    order = ProofOrder(every=request.every, last_step=request.last_step)
    runner = ProgramRunner(execution, order)
    before = files_below(root)
    note("the program runs uninterrupted")
    uninterrupted = runner.run("uninterrupted")
    written = changed(before, files_below(root))
    a = read_run(uninterrupted.folder, "the program")
    steps = [step for step in a.steps if request.last_step is None or step <= request.last_step]
    if len(steps) < 2:
        raise NotComparableError(
            f"expected checkpoints of two steps at least, found {len(steps)}: the program "
            "ends before a kill; let it make more steps, or save at each with manager.save"
        )
    rank_count = max(len(a.saves), 1)
    kills = choose_kills(request.seed, request.kill_count, steps, rank_count)
    note(f"it runs again, with {counted(len(kills), 'kill')}")
    killed = runner.run("with kills", kills)
    _check_killed(killed, kills, note)
    b = read_run(killed.folder, "the program with kills")
    verdict = judge(a, b, request.last_step, request.without)
    if verdict.is_equal:
        _check_reached(verdict, killed)
        causes, is_repeat = list[Cause](), False
    else:
        note(f"step {verdict.steps[-1]} differs; it runs uninterrupted once more")
        repeated = read_run(runner.run("repeated").folder, "the program")
        repeat = judge(a, repeated, request.last_step, request.without)
        is_repeat = not repeat.is_equal
        if is_repeat:
            verdict, b = repeat, repeated
        causes = _causes(a, b, verdict, is_repeat)
    return Proof(
        request=request,
        verdict=verdict,
        is_repeat=is_repeat,
        kills=tuple(killed.kills),
        rank_count=rank_count,
        causes=tuple(causes),
        written=written,
        directories=(a.directory, b.directory),
    )


def _check_killed(killed: ProgramRun, planned: Sequence[Kill], note: Callable[[str], None]) -> None:
    """Check that the program was killed and started again at least once."""
    for kill, step in killed.ignored:
        advice = "leave the loop where manager.reached_preemption(step) is True"
        text = f"the program trained on to its end after {kill.kind.value} at step {step}"
        if not killed.kills:
            raise NotComparableError(
                f"{text}, so that nothing was restarted: {advice}, or choose other kills "
                "with --seed"
            )
        note(f"{text}, which proves nothing: {advice}")
    missed_count = len(planned) - len(killed.kills) - len(killed.ignored)
    if killed.kills and missed_count:
        note(f"the program ended before {missed_count} of the kills")
    if not killed.kills:
        raise NotComparableError(
            f"expected a kill at step {planned[0].step}, found that the program had ended "
            "before; does it make the same steps each time?"
        )


def _causes(a: SavedRun, b: SavedRun, verdict: Verdict, is_repeat: bool) -> list[Cause]:
    assert verdict.first is not None
    return likely_causes(
        Evidence(a=a, b=b, first=verdict.first, step=verdict.steps[-1], is_repeat=is_repeat)
    )


def _check_reached(verdict: Verdict, killed: ProgramRun) -> None:
    """Check that a step after the last kill was compared.

    Raises:
        NotComparableError: none was.
    """
    last_kill = max(step for _, step in killed.kills)
    if verdict.steps[-1] < last_kill:
        raise NotComparableError(
            f"expected a checkpoint after the kill at step {last_kill} in both runs, found "
            f"step {verdict.steps[-1]} as the last one; does the program resume, and call "
            "manager.finish at its end?"
        )
