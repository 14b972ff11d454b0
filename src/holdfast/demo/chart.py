"""Draw the chart of the demo: the losses of both runs, and their progress over time.

The chart is drawn with Matplotlib's Agg, without a screen. Its colours (Okabe and Ito's) are
distinguishable for colour-blind readers, and the two runs also differ in line width.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from holdfast.demo import journal
from holdfast.demo.failures import DemoFailureKind
from holdfast.demo.report import DemoReport, FailureReport
from holdfast.demo.runner import RunLog, Start
from holdfast.store.named_file import new_content

_WHOLE = "#9ecae9"
_BROKEN = "#1b3a5c"
_MARKS = {
    DemoFailureKind.KILL: ("#d55e00", "SIGKILL"),
    DemoFailureKind.TERMINATE: ("#009e73", "SIGTERM"),
    DemoFailureKind.KILL_AGENT: ("#8e4585", "agent SIGKILL"),
    DemoFailureKind.LOSE_HOST: ("#d55e00", "lost"),
}


def draw(report: DemoReport, interrupted: RunLog, uninterrupted: RunLog, path: Path) -> None:
    """Draw the chart and write it to `path` as PNG."""
    figure = Figure(figsize=(10, 7.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, times = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_losses(losses, report, interrupted, uninterrupted)
    _draw_times(times, report, interrupted, uninterrupted)
    with new_content(path, "write the chart") as file:
        figure.savefig(file, format="png")


def _draw_losses(
    axes: Axes, report: DemoReport, interrupted: RunLog, uninterrupted: RunLog
) -> None:
    for start in uninterrupted.starts:
        axes.plot(*_loss_curve(start), color=_WHOLE, linewidth=6, label="uninterrupted run")
    for index, start in enumerate(interrupted.starts):
        label = "interrupted run" if index == 0 else None
        axes.plot(*_loss_curve(start), color=_BROKEN, linewidth=1.3, label=label)
    for level, failure in enumerate(report.failures):
        _mark(axes, failure, level, report.steps)
    same = report.identity
    axes.set_title(
        f"Loss: equal in every bit at {same.equal_losses} of {same.steps} steps", loc="left"
    )
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per byte")
    axes.legend(loc="lower left", frameon=False)
    axes.margins(x=0.01)
    _tidy(axes)


def _mark(axes: Axes, failure: FailureReport, level: int, steps: int) -> None:
    colour, name = _MARKS[failure.kind][0], _name(failure)
    axes.axvline(failure.last_step, color=colour, linestyle="--", linewidth=1.2)
    if failure.steps_lost:
        first_again = failure.last_step + 1 - failure.steps_lost
        axes.axvspan(first_again - 0.5, failure.last_step, color=colour, alpha=0.2, linewidth=0)
    is_left = failure.last_step > 0.7 * steps  # Too little space at the right of the line.
    axes.annotate(
        f"{name} after step {failure.last_step}\n{_cost(failure)}",
        xy=(failure.last_step, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if is_left else 6, -4 - 36 * level),
        textcoords="offset points",
        horizontalalignment="right" if is_left else "left",
        verticalalignment="top",
        color=colour,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5},
    )


def _draw_times(axes: Axes, report: DemoReport, interrupted: RunLog, uninterrupted: RunLog) -> None:
    for start in uninterrupted.starts:
        axes.plot(*_time_curve(start, start.spawned), color=_WHOLE, linewidth=6)
    origin = interrupted.starts[0].spawned
    for start in interrupted.starts:
        axes.plot(*_time_curve(start, origin), color=_BROKEN, linewidth=1.3)
    for failure, strike in zip(report.failures, interrupted.strikes, strict=True):
        colour, name = _MARKS[failure.kind][0], _name(failure)
        axes.plot(
            strike.time - origin, failure.last_step, "X", color=colour, markersize=9, label=name
        )
    axes.set_title("Steps finished, by the time since the run was first started", loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel("training step")
    if report.failures:
        axes.legend(loc="lower right", frameon=False)
    axes.margins(x=0.01)
    axes.set_xlim(left=0.0)
    _tidy(axes)


def _name(failure: FailureReport) -> str:
    name = _MARKS[failure.kind][1]
    return f"{failure.host} {name}" if failure.kind is DemoFailureKind.LOSE_HOST else name


def _cost(failure: FailureReport) -> str:
    if failure.kind is DemoFailureKind.KILL_AGENT:
        return "the trainer continued"
    steps = "1 step" if failure.steps_lost == 1 else f"{failure.steps_lost} steps"
    return f"{steps} lost, {failure.recovery_secs:.1f} s to the next"


def _loss_curve(start: Start) -> tuple[list[int], list[float]]:
    steps = [record for record in start.by_host[0] if isinstance(record, journal.Step)]
    return [step.step for step in steps], [step.loss_value for step in steps]


def _time_curve(start: Start, origin: float) -> tuple[list[float], list[int]]:
    steps = [record for record in start.by_host[0] if isinstance(record, journal.Step)]
    return [step.time - origin for step in steps], [step.step for step in steps]


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
