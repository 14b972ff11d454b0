"""Run the demo: one run with failures and one without, whose journals are then compared.

Invariant: when the demo ends, in whatever way, all trainers and agents that it started have ended.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.clock import Clock, SystemClock
from holdfast.demo.agents import run_command, stop_agents
from holdfast.demo.failures import choose_failures
from holdfast.demo.journal import ByHost, compare, verdict
from holdfast.demo.plan import DemoOptions, DemoPlan
from holdfast.demo.runner import Display, drive
from holdfast.errors import HoldfastError, InvalidArgumentError, NotARunError
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import RamUnavailable
from holdfast.store.location import RunLocation, open_durable

_ROOM_BYTES = 16 << 20
"""The approximate size of a checkpoint."""

_NEEDED = {"jax": ("jax", "optax", "grain"), "torch": ("torch", "grain")}


def run_demo(options: DemoOptions, *, console: Console | None = None) -> int:
    """Run the demo and print the report of the interrupted run, and whether the runs are equal.

    Args:
        options: Its options.
        console: What people read; None for standard output, or standard error beside JSON.

    Returns:
        The exit code: 0 if the interrupted run is bit-identical to the other one, 1 if it is not, 2
        if the demo failed, for which it prints the reason, 130 if it was interrupted.
    """
    console = Console(stderr=options.as_json) if console is None else console
    folder: Path | None = None
    try:
        _check_packages(options.framework)
        folder = _prepare_folder(options.directory)
        _print_line(console, f"holdfast demo: writing all files to {folder}")
        with _sigterm_as_interrupt():
            return _run(options, folder, console)
    except HoldfastError as error:
        where = "" if folder is None else f"\nThe trainers' logs are in {folder}/*.log"
        _print_line(console, f"{error}{where}{_little_room(folder)}")
        return 2
    except OSError as error:
        _print_line(console, f"holdfast demo: write its files: {error}{_little_room(folder)}")
        return 2
    except KeyboardInterrupt:
        _print_line(
            console, f"interrupted; all processes have been ended, the logs are in {folder}"
        )
        return 130


def _run(options: DemoOptions, folder: Path, console: Console) -> int:
    clock = SystemClock()
    start_secs = clock.monotonic()
    place = str(folder) if options.url is None else checked_place(options.url)
    failures = choose_failures(
        options.seed, options.step_count, kill_agent=options.kill_agent, hosts=options.hosts
    )
    plans = [
        DemoPlan(options=options, name=name, folder=folder, place=place, failures=planned)
        for name, planned in (("interrupted", failures), ("uninterrupted", ()))
    ]
    display = Display(console)
    identity = compare(*[_drive_and_stop(plan, display, clock) for plan in plans])
    run, page = plans[0].run, folder / "report.html"
    _print_line(console, f"\n$ holdfast report {run} --html {page}")
    _print_line(console, run_command("report", run, "--html", str(page)))
    for reason in sorted({e.reason for e in read_events(RunLocation(run).folder, RamUnavailable)}):
        _print_line(console, f"checkpoints were not stored in RAM: {reason}")
    _print_line(console, f"the whole demo took {clock.monotonic() - start_secs:.0f} s")
    _print_line(console, verdict(identity))
    _print_line(console, f"where the time of the interrupted run went: {page.as_uri()}")
    if options.as_json:
        report = msgspec.Raw(run_command("report", run, "--json").encode())
        encoded = msgspec.json.encode({"identity": identity, "report": report})
        print(msgspec.json.format(encoded).decode())
    return 0 if all(identity.values()) else 1


def _drive_and_stop(plan: DemoPlan, display: Display, clock: Clock) -> ByHost:
    """Drive a run and stop its agents, even after an error."""
    try:
        return drive(plan, display, clock)
    finally:
        try:
            stop_agents(plan.run, clock)
        except HoldfastError as error:
            display.show_line(f"stopping the agents of the {plan.name} run failed: {error}")


def _check_packages(framework: str) -> None:
    needed = _NEEDED[framework]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = "demo" if framework == "jax" else f"demo,{framework}"
        raise InvalidArgumentError(
            f"holdfast demo: expected {', '.join(needed)} to be installed, not found: "
            f"{', '.join(missing)}; install `holdfast-checkpoint[{extras}]`"
        )


def checked_place(url: str) -> str:
    """Return the URL below which the runs of the demo lie.

    Raises:
        InvalidArgumentError: It is no URL.
        NotARunError: Something is there already.
    """
    location = RunLocation.parse(url)
    if not location.is_url:
        raise InvalidArgumentError(
            f"holdfast demo: expected --url with one as s3://bucket/demo, found {url}; "
            "--directory takes a folder"
        )
    store = open_durable(location.text, SystemClock())
    if next(store.list("interrupted"), None) or next(store.list("uninterrupted"), None):
        raise NotARunError(
            f"holdfast demo: expected nothing at {location}, found runs; choose another URL"
        )
    return location.text


def _prepare_folder(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = next(directory.iterdir(), None) is None
    except OSError as error:
        raise InvalidArgumentError(f"holdfast demo: cannot use {directory}: {error}") from error
    if not is_empty:
        raise InvalidArgumentError(
            f"holdfast demo: expected {directory} to be empty, found files; choose another folder"
        )
    return directory.resolve()


def _little_room(folder: Path | None) -> str:
    """Return a hint if the disk is full, which the trainers' logs may be unable to record."""
    if folder is None:
        return ""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes > _ROOM_BYTES:
        return ""
    return (
        f"\nThe disk of {folder} has {free_bytes} bytes left: free some, or choose another folder"
    )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Make SIGTERM unwind the demo as Ctrl-C does, so that no process continues to run."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
