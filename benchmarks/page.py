"""What a benchmark run leaves: a table in docs/performance.md, and beside it JSON and a chart.

A row that is measured by itself takes its place in what earlier runs left.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"
RESULTS = DOCS / "performance.json"
CHART = DOCS / "performance.png"
MULTIPLE_MIN, MULTIPLE_MAX = 0.05, 50.0
BEGIN, END = "<!-- figures: made by `make bench` -->", "<!-- end of figures -->"


def clear() -> None:
    """Forgets what earlier runs left: all of it is measured anew."""
    RESULTS.unlink(missing_ok=True)


def write(figures: Sequence[Figure], rounds: int) -> None:
    """Adds these figures to what earlier runs left, and writes table and chart anew."""
    results = _results()
    for figure in figures:
        results[f"{figure.row} | {figure.state}"] = {
            **figure.as_json(),
            **_where(rounds),
        }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    _write_table(list(results.values()))
    _draw(list(results.values()))


def _results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _where(rounds: int) -> dict[str, Any]:
    packages = ("jax", "orbax-checkpoint", "numpy", "torch", "torch-checkpointing")
    return {
        "rounds": rounds,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _write_table(results: Sequence[dict[str, Any]]) -> None:
    lines = [
        BEGIN,
        "| figure | state | wanted | reached | | taken |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {r['row']} | {r['state']} | {_sign(r)} {_number(r['wanted'])} {r['unit']} "
            f"| {_number(r['reached'])} {r['unit']} | {'met' if r['met'] else '**missed**'} "
            f"| {r['date']}, {r['rounds']} |"
            for r in results
        ),
        END,
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + "\n".join(lines) + rest.partition(END)[2])


def _sign(result: dict[str, Any]) -> str:
    return "≤" if result["at_most"] else "≥"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _times_better(result: dict[str, Any]) -> float:
    reached, wanted = result["reached"], result["wanted"]
    if not wanted:
        # Of nothing there is no multiple.
        return 1.0 if result["met"] else MULTIPLE_MIN
    return wanted / max(reached, 1e-9) if result["at_most"] else reached / wanted


def _draw(results: Sequence[dict[str, Any]]) -> None:
    """How far each figure is from what was wanted: beyond the line is better."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    names = [f"{r['row']}\n{r['state']}" for r in results]
    better = [_times_better(result) for result in results]
    figure, axes = plt.subplots(figsize=(10, 0.42 * len(results) + 1.2))
    places = range(len(results))
    colors = ["#2a78b5" if r["met"] else "#c44e52" for r in results]
    ends = [min(max(b, MULTIPLE_MIN), MULTIPLE_MAX) for b in better]
    # Bars begin where reached is as wanted: to the right what is better, to the left what is worse.
    widths = [end - 1 for end in ends]
    axes.barh(list(places), widths, left=1, color=colors, height=0.6)
    axes.set_yticks(list(places), names, fontsize=7)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(min(0.45, 0.9 * min(ends)), 1.6 * max(ends))
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times as good as was wanted (log scale); worse is left of the line")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for place, result in zip(places, results, strict=True):
        text = f" {_number(result['reached'])} {result['unit']}"
        axes.text(max(ends[place], 1), place, text, va="center", fontsize=7)
    figure.savefig(CHART, dpi=110, bbox_inches="tight")
    plt.close(figure)
