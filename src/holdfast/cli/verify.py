"""Implement `holdfast verify`: read every block, and report the bad bytes of each file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.findings import Copy, bad_record, check_attempts, check_copy, copies_of, is_gone
from holdfast.cli.output import counted, size_text
from holdfast.engine.lifecycle.run import noted_remote
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.verify import BlockCheck
from holdfast.engine.reading.view import LISTINGS_MAX
from holdfast.errors import HoldfastError, StepNotFoundError
from holdfast.format.names import RUN_FILE
from holdfast.trainer.opening.run_access import read_damaged


@dataclass(slots=True)
class Result:
    """The result of reading one copy; `copy` is None for the records of the run itself."""

    copy: Copy | None
    size_bytes: int = 0
    problems: list[BlockCheck] = field(default_factory=list)


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("step", metavar="[STEP]", type=click.IntRange(min=0), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(directory: str, step: int | None, as_json: bool) -> int:
    """Read every block of the run in DIR and check it.

    The run's remote tier is a run of its own for this command.

    Without STEP it reads every checkpoint that is committed or whole, the copies in this host's
    memory, and the records of the run and its attempts. Each problem is printed with its file and
    byte range, and the exit code is then 1; so it is if a live run deleted all that was listed, and
    for what a newer Holdfast wrote, which cannot be checked.
    """
    run, own_problem = read_damaged(directory)
    results: list[Result] = []
    with _bar() as bar:
        of_run = [] if step is not None else [_of_run(run, own_problem)]
        for result in itertools.chain(of_run, _of_copies(run, step, bar)):
            results.append(result)
            if not as_json and bar.disable:
                _print_result(run, result)
    remote = noted_remote(run.durable)
    if remote is not None:
        output.note(f"the run's remote tier was not read; `holdfast verify {remote}` reads it")
    if as_json:
        output.print_json(_document(run, results))
        return _exit_code(results)
    if not bar.disable:
        for result in results:
            _print_result(run, result)
    _print_end(results)
    return _exit_code(results)


def _exit_code(results: Iterable[Result]) -> int:
    return 1 if any(result.problems for result in results) else 0


def _of_run(run: ReadableRun, own_problem: HoldfastError | None) -> Result:
    problems = list(check_attempts(run))
    if own_problem is not None:
        problems.insert(0, bad_record(run.durable, RUN_FILE, own_problem))
    return Result(None, 0, problems)


def _bar() -> Progress:
    """Return a progress bar for a terminal.

    Results are printed after the bar has ended, because it would overwrite them.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=output.stderr(),
        disable=not output.stderr().is_terminal,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("", total=None)
    return bar


def _listed_bytes(copy: Copy) -> int:
    return copy.listing.size_bytes


def _of_copies(run: ReadableRun, step: int | None, bar: Progress) -> Iterator[Result]:
    """Read all copies; a live run that deletes each before it is read is listed again.

    Raises:
        StepNotFoundError: there is no such step, or each copy was deleted, `LISTINGS_MAX` times.
    """
    for _ in range(LISTINGS_MAX):
        copies = [copy for copy in copies_of(run) if step is None or copy.id.step == step]
        if not copies:
            if step is None:
                return
            _check_not_remote(run, step)
        is_any = False
        for result in _results(copies, bar):
            is_any = True
            yield result
        if is_any:
            return
    raise StepNotFoundError(
        f"verify {run.location}: nothing was checked: the run deleted all checkpoints of each of "
        f"{LISTINGS_MAX} listings meanwhile; verify a copy of it, or let the run keep more"
    )


def _check_not_remote(run: ReadableRun, step: int) -> None:
    """Check that a step which no other tier has is not in the remote tier either.

    Raises:
        StepNotFoundError: no tier has it, or the remote tier alone.
    """
    view = run.look_for(step)()
    checkpoint = view.find(step)
    holders = [store for store in view.stores if checkpoint in view.listings[store.name]]
    if all(store.is_optional for store in holders):
        raise StepNotFoundError(
            f"verify step {step} of {run.location}: its remote tier alone has it; call `holdfast "
            f"verify {noted_remote(run.durable)} {step}`"
        )


def _results(copies: Sequence[Copy], bar: Progress) -> Iterator[Result]:
    (task,) = bar.task_ids
    bar.update(task, total=sum(_listed_bytes(copy) for copy in copies), completed=0)
    done_bytes = 0
    for copy in copies:
        bar.update(task, description=f"step {copy.id.step}, {copy.store.tier}")
        result = Result(copy)
        for check in check_copy(copy):
            if check.problem is not None:
                result.problems.append(check)
            if check.found is not None:
                result.size_bytes += check.stop_bytes - check.start_bytes
            bar.update(task, completed=done_bytes + result.size_bytes)
        done_bytes += _listed_bytes(copy)
        bar.update(task, completed=done_bytes)
        # Problems of a copy that was deleted while it was read are not damage.
        if not (result.problems and is_gone(copy)):
            yield result


def _document(run: ReadableRun, results: Sequence[Result]) -> dict[str, object]:
    return {
        "run": str(run.location),
        "ok": not any(result.problems for result in results),
        "checked_bytes": sum(result.size_bytes for result in results),
        "copies": [
            {
                "step": result.copy.id.step,
                "attempt": result.copy.id.attempt.number,
                "tier": result.copy.store.tier,
                "checked_bytes": result.size_bytes,
                "ok": not result.problems,
            }
            for result in results
            if result.copy is not None
        ],
        "problems": [
            {
                "step": result.copy.id.step if result.copy else None,
                "attempt": result.copy.id.attempt.number if result.copy else None,
                "tier": check.tier,
                "file": str(_path(run, check)),
                "start_bytes": check.start_bytes,
                "stop_bytes": check.stop_bytes,
                "expected": check.expected or None,
                "found": check.found,
                "problem": check.problem,
                "newer": check.is_newer,
            }
            for result in results
            for check in result.problems
        ],
    }


def _path(run: ReadableRun, check: BlockCheck) -> str:
    ram = run.find_ram()
    root = ram.root if ram is not None and check.tier == ram.tier else run.location
    return f"{root}/{check.key}"


def _print_result(run: ReadableRun, result: Result) -> None:
    copy = result.copy
    if copy is None and result.problems:
        output.print_line(Text.assemble("records of the run: ", _verdict(result)))
    if copy is not None:
        line = Text(f"step {copy.id.step}, attempt {copy.id.attempt}, {copy.store.tier}: ")
        line.append(*_verdict(result))
        line.append(f", {size_text(result.size_bytes)}")
        output.print_line(line)
    for check in merged(result.problems):
        output.print_line(f"  {_path(run, check)}")
        output.print_line(f"    bytes [{check.start_bytes}, {check.stop_bytes}): {check.problem}")
        if check.found is not None:
            output.print_line(
                f"    expected digest {check.expected}\n    found digest    {check.found}"
            )


def _verdict(result: Result) -> tuple[str, str]:
    """Return the verdict on what was read, and its style."""
    if not result.problems:
        return "good", "green"
    if all(check.is_newer for check in result.problems):
        return "newer than this Holdfast", "yellow"
    return "BAD", "bold red"


def merged(problems: Iterable[BlockCheck]) -> Iterator[BlockCheck]:
    """Merge bad ranges that touch or overlap into one without digests; yield the others as is."""
    last: BlockCheck | None = None
    count = 1
    for check in problems:
        if last is not None and last.key == check.key and check.start_bytes <= last.stop_bytes:
            count += 1
            last = replace(
                last,
                start_bytes=min(last.start_bytes, check.start_bytes),
                stop_bytes=max(last.stop_bytes, check.stop_bytes),
                found=None,
                problem=f"{count} bad blocks" if check.found is not None else last.problem,
            )
            continue
        if last is not None:
            yield last
        last, count = check, 1
    if last is not None:
        yield last


def _print_end(results: Sequence[Result]) -> None:
    copies = [result for result in results if result.copy is not None]
    steps = {result.copy.id for result in copies if result.copy is not None}
    total = size_text(sum(result.size_bytes for result in results))
    checked = (
        f"{counted(len(steps), 'checkpoint')}, {counted(len(copies), 'copy', 'copies')}, {total}"
    )
    problems = [check for result in results for check in result.problems]
    bad = [check for check in problems if not check.is_newer]
    newer_count = len({(check.tier, check.key) for check in problems if check.is_newer})
    if newer_count:
        text = f"{counted(newer_count, 'file')} of a newer format: not checked, upgrade Holdfast"
        output.print_line(Text(text, "yellow"))
    if not copies and not problems:
        output.print_line("nothing was checked but the records of the run: it has no checkpoint")
        return
    if not bad:
        verdict = "no damage in what was read" if newer_count else "all good"
        output.print_line(Text(f"{verdict}: {checked}", "green"))
        return
    files = len({(check.tier, check.key) for check in bad})
    ranges = len(list(merged(bad)))
    line = Text(f"BAD: {counted(ranges, 'range')} in {counted(files, 'file')}", "bold red")
    line.append(f"; checked {checked}", "not bold default")
    output.print_line(line)
