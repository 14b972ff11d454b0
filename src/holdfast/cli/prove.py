"""Implement `holdfast prove`: run a program with and without kills, and compare what it saves."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.cli.diff import NOT_COMPARABLE, print_differences
from holdfast.cli.output import counted, size_text
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError, InvalidArgumentError, OutOfSpaceError
from holdfast.proving.program import Execution, NotComparableError
from holdfast.proving.proof import NAMED_MAX, Proof, ProofRequest
from holdfast.proving.proof import prove as prove_program
from holdfast.proving.verdict import Verdict
from holdfast.supervise.command import ColdStarts, Signals
from holdfast.supervise.own_folder import OF_PROOF, own_folder

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How `prove` and `bisect` run a command and print the result.

    Attributes:
        without: the names in the state that are not compared, with all below them.
        directory: the new folder to keep; None: a temporary one.
        timeout_secs: how long the command may take until a new step, or its end.
        as_json: whether the result, or an error, is printed as a document.
    """

    without: tuple[str, ...]
    directory: Path | None
    timeout_secs: float
    as_json: bool


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of `RunOptions`, which it takes as `options`."""

    @click.option(
        "--without",
        metavar="PATH",
        multiple=True,
        help="Do not compare what is at or below this path in the state; repeat for several.",
    )
    @click.option(
        "--directory",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Keep what the program saves in this new directory; default: a temporary one.",
    )
    @click.option(
        "--timeout",
        "timeout_secs",
        metavar="SECS",
        type=Amount(min=0, min_open=True),
        default=1800,
        show_default=True,
        help="Give up if the program makes no new step, and does not end, for so long.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @functools.wraps(command)
    def with_options(
        without: tuple[str, ...],
        directory: Path | None,
        timeout_secs: float,
        as_json: bool,
        **others: Any,
    ) -> int:
        options = RunOptions(
            without=without, directory=directory, timeout_secs=timeout_secs, as_json=as_json
        )
        return command(options=options, **others)

    return with_options


@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --")
@click.argument("command", metavar="CMD…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--kills",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often to kill the program.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Compare the first N steps, and end the program after them; default: to its own end.",
)
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(min=1),
    help="Compare each step that is a multiple of N; default: fewer the later they are.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the kills.")
@run_options
def prove(
    command: tuple[str, ...],
    kills: int,
    steps: int | None,
    every: int | None,
    seed: int,
    options: RunOptions,
) -> int:
    """Prove that the training of CMD is the same with kills as without.

    The program runs uninterrupted. Then it runs again and is killed at steps that --seed chooses,
    by SIGKILL, by SIGTERM, and with the loss of the host's RAM, and started again each time. All
    checkpoints of equal steps are compared by their digests, and the metrics by their bits. The
    program is not changed: the runs that it opens are in a folder of the proof, so no real run and
    no remote tier is touched. Its other files are written as always.

    The exit code is 0 if all are identical; 1 if not: then the first step that differs is shown
    with the likely cause; and 2 if the program cannot be judged (docs/exactness.md).
    """
    request = ProofRequest(
        kill_count=kills,
        seed=seed,
        last_step=None if steps is None else steps - 1,
        every=every,
        without=options.without,
    )
    proof = judged(lambda execution: prove_program(request, execution), command, options)
    if proof is None:
        return NOT_COMPARABLE
    if options.as_json:
        output.print_json(proof.document)
    else:
        _print(proof)
        if options.directory is not None:
            output.print_line(f"compared runs: {' '.join(proof.directories)}")
    return 0 if proof.verdict.is_equal else 1


def judged(
    judge: Callable[[Execution], T], command: Sequence[str], options: RunOptions
) -> T | None:
    """Run a command as often as `judge`, which is given how to run it, needs to judge it.

    Returns:
        What `judge` returns; None if the command cannot be judged: the reason is printed.
    """
    signals, name = Signals(), click.get_current_context().info_name
    try:
        with _proof_folder(options.directory) as root, signals.handled(), _room_in(root):
            execution = Execution(
                starts=lambda output_fd: ColdStarts(command, output_fd),
                root=root,
                timeout_secs=options.timeout_secs,
                signals=signals,
                clock=SystemClock(),
                note=lambda text: output.note(f"holdfast {name}: {text}"),
            )
            return judge(execution)
    except HoldfastError as error:
        lines, text = list[str](), str(error)
        if isinstance(error, NotComparableError):
            lines, text = [*error.output], f"{name}: {error}"
        output.print_error(f"{text}{'; its last lines:' if lines else ''}")
        for line in lines:
            output.note(f"  {line}")
        if options.as_json:
            document = {"error": type(error).__name__, "message": text, "output": lines}
            output.print_json(document)
        return None


@contextlib.contextmanager
def _proof_folder(directory: Path | None) -> Iterator[Path]:
    """Yield the new folder for what a program saves: the one given, or a temporary one."""
    if directory is None:
        with own_folder(OF_PROOF) as folder:
            yield folder
        return
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--directory: expected a new directory, found {directory}: {error.strerror}"
        ) from error
    yield directory.absolute()


@contextlib.contextmanager
def _room_in(root: Path) -> Iterator[None]:
    """Say what to do in an error of the block that is due to a full folder.

    Raises:
        OutOfSpaceError, NotComparableError: the folder is full.
    """
    advice = f"{root} is full: choose a folder with more room, with TMPDIR or --directory"
    try:
        yield
    except NotComparableError as error:
        full = os.strerror(errno.ENOSPC)
        if not any(str(root) in line and full in line for line in error.output):
            raise
        raise NotComparableError(f"{error}; {advice}", error.output) from error
    except OutOfSpaceError as error:
        raise OutOfSpaceError(f"{error}; {advice}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpaceError(advice) from error


def _print(proof: Proof) -> None:
    verdict, first = proof.verdict, proof.verdict.first
    for name in proof.written[:NAMED_MAX]:
        output.note(f"written meanwhile: {name}; if the program writes it, each run has")
    kills = ", ".join(f"{kill.kind.value} at step {step}" for kill, step in proof.kills)
    counts = verdict.document
    compared = (
        f"{counted(len(verdict.steps), 'step')} from {verdict.steps[0]} to {verdict.steps[-1]}, "
        f"each {counted(counts['arrays_per_step'], 'array')}, "
        f"{size_text(counts['compared_bytes'])} in all, {counted(counts['values'], 'value')}, "
        f"{counted(counts['metrics'], 'metric')}; "
        f"{counted(proof.rank_count, 'process', 'processes')}"
    )
    if first is None:
        output.print_line(f"identical: {compared}")
        output.print_line(f"with {kills}")
        print_left_out(verdict)
        return
    against = (
        "the program differs from itself without a kill" if proof.is_repeat else f"with {kills}"
    )
    output.print_line(
        f"different: step {verdict.steps[-1]} is the first one that differs; {against}"
    )
    print_differences(first.differences, indent="  ")
    for cause in proof.causes:
        output.print_line(f"likely cause: {cause.name}: {cause.reason}")
        output.print_line(f"  {cause.cure}")
    output.print_line(f"compared: {compared}")
    print_left_out(verdict)


def print_left_out(verdict: Verdict) -> None:
    """Print what was not compared, a line each."""
    for reason in verdict.left_out:
        output.print_line(f"not compared: {reason}")
