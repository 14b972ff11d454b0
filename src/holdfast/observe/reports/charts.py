"""Draw the charts of a report as SVG.

Drawn here, without a plotting library, so that a report needs no package besides the core's, and so
that the colours follow the page's light and dark schemes. Colours are classes of the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from holdfast.observe.reports.model import CATEGORIES, RunReport, Slice
from holdfast.observe.reports.words import (
    CATEGORY_WORDS,
    CAUSE_WORDS,
    TIER_WORDS,
    duration_text,
    tick_text,
)

WIDTH = 960
LEFT = 56
RIGHT = 16
COLUMNS = 180
BINS = 24
TICKS_SHOWN_MAX = 400
LABELS_MAX = 8
"""How many labels an axis has room for."""
MINUTE, HOUR, DAY = 60, 3600, 86_400
ROUND_SECS = (
    *(digit * 10.0**power for power in range(-3, 1) for digit in (1, 2, 5)),
    *(10, 20, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 20 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 6 * HOUR, 12 * HOUR),
    *(digit * 10**power * DAY for power in range(4) for digit in (1, 2, 5)),
)
"""The durations that ticks of axes show, ascending."""


def categories_bar(report: RunReport) -> Element:
    """Draw one bar that is divided by category."""
    svg = _svg(36, "The run's time by category")
    x = 0.0
    for name in CATEGORIES:
        width = WIDTH * report.categories[name] / report.wall_secs
        if width > 0:
            part = _rect(svg, (x, 0, width, 36), f"c-{name}")
            SubElement(
                part, "title"
            ).text = f"{CATEGORY_WORDS[name]}: {duration_text(report.categories[name])}"
        x += width
    return svg


def timeline(report: RunReport) -> Element:
    """Draw the categories over time, with failures above and checkpoints below."""
    tiers = [(name, tier) for name, tier in report.tiers.items() if tier.at_secs]
    top, height = 34, 150
    bottom = top + height
    svg = _svg(bottom + 18 * len(tiers) + 30, "The run over time, with failures and checkpoints")
    scale = _Scale(0.0, report.wall_secs, LEFT, WIDTH - RIGHT)
    width = (WIDTH - RIGHT - LEFT) / COLUMNS
    for index, amounts in enumerate(_columns(report)):
        total = sum(amounts.values())
        y = float(bottom)
        for name in CATEGORIES:
            part = height * amounts.get(name, 0.0) / total if total else 0.0
            y -= part
            if part > 0:
                _rect(svg, (LEFT + index * width, y, width + 0.3, part), f"c-{name}")
    _text(svg, LEFT - 6, top + 10, "100 %", "end")
    _text(svg, LEFT - 6, bottom, "0", "end")
    for number, failure in enumerate(report.failures, 1):
        x = scale.at(failure.at_secs)
        _line(svg, (x, top - 10, x, bottom), "mark")
        mark = _text(svg, x, top - 14, str(number), "middle")
        SubElement(mark, "title").text = CAUSE_WORDS.get(failure.cause, failure.cause)
    for row, (name, tier) in enumerate(tiers):
        y = bottom + 8 + 18 * row
        _text(svg, LEFT - 6, y + 10, TIER_WORDS.get(name, name).split()[-1], "end")
        step = max(1, len(tier.at_secs) // TICKS_SHOWN_MAX)
        for secs in tier.at_secs[::step]:
            _line(svg, (scale.at(secs), y, scale.at(secs), y + 12), "tick")
    _time_axis(svg, scale, bottom + 18 * len(tiers) + 8)
    return svg


def goodput_over_time(report: RunReport) -> Element:
    """Draw the goodput so far, and that of each twentieth of the run."""
    top, height = 8, 140
    bottom = top + height
    svg = _svg(bottom + 30, "Goodput over time: so far, and lately")
    scale = _Scale(0.0, report.wall_secs, LEFT, WIDTH - RIGHT)
    columns = _columns(report)
    for share, text in ((0.0, "0"), (0.5, "50 %"), (1.0, "100 %")):
        y = bottom - height * share
        _line(svg, (LEFT, y, WIDTH - RIGHT, y), "grid")
        _text(svg, LEFT - 6, y + 4, text, "end")
    near = max(1, COLUMNS // 20)
    so_far: list[tuple[float, float]] = []
    lately: list[tuple[float, float]] = []
    length = report.wall_secs / COLUMNS
    for index in range(COLUMNS):
        x = scale.at((index + 1) * length)
        for points, chosen in (
            (so_far, columns[: index + 1]),
            (lately, columns[max(0, index + 1 - near) : index + 1]),
        ):
            total = sum(sum(amounts.values()) for amounts in chosen)
            good = sum(amounts.get("productive", 0.0) for amounts in chosen)
            points.append((x, bottom - height * (good / total if total else 0.0)))
    _path(svg, lately, "lately")
    _path(svg, so_far, "so-far")
    _time_axis(svg, scale, bottom + 8)
    return svg


def intervals_histogram(name: str, values_secs: Sequence[float]) -> Element:
    """Draw how often intervals of each length occurred, on a logarithmic axis."""
    top, height = 8, 90
    bottom = top + height
    svg = _svg(bottom + 30, f"Intervals between checkpoints: {TIER_WORDS.get(name, name)}")
    ticks = _round_ticks(min(values_secs), max(values_secs))
    low, high = ticks[0], ticks[-1]
    counts = [0] * BINS
    for value in values_secs:
        share = math.log(min(high, max(value, low)) / low) / math.log(high / low)
        counts[min(BINS - 1, int(share * BINS))] += 1
    width = (WIDTH - LEFT - RIGHT) / BINS
    for index, count in enumerate(counts):
        part = height * count / max(counts)
        if count:
            bar = (LEFT + index * width + 1, bottom - part, width - 2, part)
            SubElement(_rect(svg, bar, "bar"), "title").text = str(count)
    _line(svg, (LEFT, bottom, WIDTH - RIGHT, bottom), "grid")
    _text(svg, LEFT - 6, top + 8, str(max(counts)), "end")
    for tick in ticks:
        x = LEFT + math.log(tick / low) / math.log(high / low) * (WIDTH - LEFT - RIGHT)
        anchor = "start" if tick == low else "end" if tick == high else "middle"
        _text(svg, x, bottom + 18, tick_text(tick), anchor)
    return svg


def _round_ticks(low_secs: float, high_secs: float) -> list[float]:
    """Return round durations around some, for the labels of a logarithmic axis."""
    first = max((n for n, secs in enumerate(ROUND_SECS) if secs <= low_secs), default=0)
    last = next(
        (n for n, secs in enumerate(ROUND_SECS) if secs >= high_secs and n > first),
        len(ROUND_SECS) - 1,
    )
    ticks = [*ROUND_SECS[min(first, last - 1) : last + 1]]
    while len(ticks) > LABELS_MAX:
        ticks = [*ticks[:-1:2], ticks[-1]]
    return ticks


class _Scale:
    """Map seconds to the x axis."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high
        self._left, self._right = left, right

    def at(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self._left + min(1.0, max(0.0, share)) * (self._right - self._left)


def _columns(report: RunReport) -> list[dict[str, float]]:
    """Return the categories of equal parts of the run's time; a slice counts evenly."""
    columns: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    length = report.wall_secs / COLUMNS
    for piece in report.timeline:
        _spread(piece, columns, length)
    return columns


def _spread(piece: Slice, columns: list[dict[str, float]], length: float) -> None:
    end_secs = piece.start_secs + piece.secs
    first = min(COLUMNS - 1, int(piece.start_secs / length))
    last = min(COLUMNS - 1, int(end_secs / length))
    for index in range(first, last + 1):
        inside = min(end_secs, (index + 1) * length) - max(piece.start_secs, index * length)
        share = max(0.0, inside) / piece.secs if piece.secs else 0.0
        for name, secs in piece.categories.items():
            columns[index][name] = columns[index].get(name, 0.0) + secs * share


def _time_axis(svg: Element, scale: _Scale, y: float) -> None:
    span = scale.high
    step = next((secs for secs in ROUND_SECS if span / secs <= LABELS_MAX), ROUND_SECS[-1])
    at = 0.0
    while at <= span:
        x = scale.at(at)
        _line(svg, (x, y - 4, x, y), "grid")
        _text(svg, x, y + 14, tick_text(at) if at else "0", "middle")
        at += step


def _svg(height: float, title: str) -> Element:
    svg = Element(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {height:g}", "role": "img", "aria-label": title},
    )
    SubElement(svg, "title").text = title
    return svg


def _rect(svg: Element, box: tuple[float, float, float, float], style: str) -> Element:
    names = ("x", "y", "width", "height")
    sizes = {name: f"{value:.2f}" for name, value in zip(names, box, strict=True)}
    return SubElement(svg, "rect", {**sizes, "class": style})


def _line(svg: Element, ends: tuple[float, float, float, float], style: str) -> None:
    names = ("x1", "y1", "x2", "y2")
    sizes = {name: f"{value:.2f}" for name, value in zip(names, ends, strict=True)}
    SubElement(svg, "line", {**sizes, "class": style})


def _text(svg: Element, x: float, y: float, text: str, anchor: str) -> Element:
    members = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    element = SubElement(svg, "text", members)
    element.text = text
    return element


def _path(svg: Element, points: Sequence[tuple[float, float]], style: str) -> None:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    SubElement(svg, "polyline", {"points": text, "class": style})
