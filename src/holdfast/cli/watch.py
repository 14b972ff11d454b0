"""Implement `holdfast watch`: show a run in the terminal, refreshed as it goes on."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli import output
from holdfast.clock import SystemClock
from holdfast.host.wire.agents_here import asker
from holdfast.observe.events.reader import line_of
from holdfast.observe.events.schema import StepProgress
from holdfast.observe.live.follower import Poll, RunFollower
from holdfast.observe.live.snapshot import LiveView, ShownHost
from holdfast.observe.metrics.measures import StepSpan
from holdfast.observe.reports.words import duration_text, share_text
from holdfast.observe.state_words import step_text
from holdfast.trainer.opening.run_access import read_only

LINES_KEPT = 200
LINES_SHOWN_MIN = 5
SPARKS = "▁▂▃▄▅▆▇█"
PHASE_WORDS = {
    "quiet": "without a checkpoint",
    "sealing": "while one is taken",
    "writing": "while one is written",
}


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--once", is_flag=True, help="Print the state now, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the state now as one JSON document.")
def watch(directory: str, once: bool, as_json: bool) -> None:
    """Show the run in DIR in the terminal, as it goes on; Ctrl-C ends it.

    Without a terminal it prints the state once. `holdfast page` shows the same in a browser.
    """
    run = read_only(directory)
    clock = SystemClock()
    follower = RunFollower(run, asker(run), clock)
    if as_json:
        output.print_json(follower.poll().view)
        return
    lines: deque[str] = deque(maxlen=LINES_KEPT)
    console = output.stdout()
    if once or not console.is_terminal:
        shown = screen(_look(follower, lines).view, list(lines)[-LINES_SHOWN_MIN:], 0)
        console.print(shown, soft_wrap=True)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = _look(follower, lines).view
            live.update(_fitted(console, view, lines), refresh=True)
            clock.sleep(follower.poll_secs)


def _look(follower: RunFollower, lines: deque[str]) -> Poll:
    poll = follower.poll()
    shown = (e for e in poll.events if not e.is_of_saves and not isinstance(e, StepProgress))
    lines.extend(map(line_of, shown))
    return poll


def _fitted(console: Console, view: LiveView, lines: Sequence[str]) -> RenderableType:
    """Return the screen with as many events as there is room for."""
    above = len(console.render_lines(screen(view, [], console.width), pad=False))
    room = max(LINES_SHOWN_MIN, console.height - above - 1)
    return screen(view, list(lines)[-room:], console.width)


def screen(view: LiveView, lines: Sequence[str], width: int) -> Group:
    """Return what is shown; names and reasons are text, never markup.

    Args:
        view: The state of the run.
        lines: The newest events.
        width: The width of the terminal; 0: lines are not cut.
    """
    is_bad = any(host.problem for host in view.hosts)
    parts: list[RenderableType] = [
        Text(_printable(view.run), "bold"),
        Text(_printable(view.headline), "bold red" if is_bad else ""),
        Text(""),
        _facts(view),
        Text(""),
    ]
    if view.hosts:
        parts += [_hosts(view.hosts), Text("")]
    durable = ", ".join(f"{step:,}" for step in view.durable) or view.durable_text
    parts.append(Text(f"durable steps: {durable}"))
    if view.newest:
        parts.append(Text(f"newest: {view.newest}"))
        parts.append(Text(f"survives: {'; '.join(view.survives)}"))
    if view.steps:
        parts += [Text(""), *_steps(view.steps, width)]
    if view.last_failure:
        parts += [Text(""), Text("last failure: " + _printable(" ".join(view.last_failure)))]
    if view.problems:
        parts += [
            Text(""),
            *(Text(f"not known: {_printable(problem)}") for problem in view.problems[:3]),
        ]
    if lines:
        parts += [Text(""), *(_line(line, width) for line in lines)]
    return Group(*parts)


def _line(text: str, width: int) -> Text:
    line = Text(_printable(text), "dim", no_wrap=True, overflow="ellipsis")
    if width:
        line.truncate(width, overflow="ellipsis")
    return line


def _facts(view: LiveView) -> Text:
    step = "no step yet" if view.step is None else step_text(view.step)
    facts = [step, f"attempt {view.attempt}", f"{view.failures} failures"]
    if view.goodput is not None:
        shares = [
            f"{category.text} {share_text(category.share)}" for category in view.categories[1:]
        ]
        rest = f" ({', '.join(shares)})" if shares else ""
        facts.append(f"goodput {view.goodput_text} of {view.wall}{rest}")
    return Text(" · ".join(facts))


def _hosts(hosts: Sequence[ShownHost]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("host", "trainers", "RAM", "holds"):
        table.add_column(title, overflow="fold")
    for host in hosts:
        name = host.name + (" (leads)" if host.is_leading else "")
        if host.problem:
            cells = [name, host.ranks, "–", f"does not answer: {host.problem}"]
            table.add_row(*(Text(_printable(cell), "red") for cell in cells))
            continue
        cells = [name, host.ranks, host.memory, host.holds_text]
        table.add_row(*(Text(_printable(cell)) for cell in cells))
    return table


def _steps(spans: Sequence[StepSpan], width: int) -> list[Text]:
    """Return a line of bars, one for each span, marked where a checkpoint was taken or written."""
    shown = list(spans)[-max(20, (width or 100) - 2) :]
    each = [span.secs / span.steps for span in shown]
    high = max(*each, 1e-9) if len(each) > 1 else max(each[0], 1e-9)
    bars, marks = Text(no_wrap=True), Text(no_wrap=True)
    for span, secs in zip(shown, each, strict=True):
        bars.append(SPARKS[min(len(SPARKS) - 1, int(secs / high * len(SPARKS)))])
        marks.append({"quiet": " ", "writing": "w", "sealing": "s"}[span.phase])
    medians = [
        f"{words} {duration_text(statistics.median(own))}"
        for phase, words in PHASE_WORDS.items()
        if (own := [s for span, s in zip(shown, each, strict=True) if span.phase == phase])
    ]
    return [
        Text("step time: " + ", ".join(medians) + " (s: taken, w: written)"),
        bars,
        marks,
    ]


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
