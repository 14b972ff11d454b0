"""The axes of a report's charts have round ticks, with room for their labels."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

import pytest

from holdfast.observe.reports.charts import LABELS_MAX, goodput_over_time, intervals_histogram
from holdfast.observe.reports.goodput import report_run
from tests.observe.reports.test_accounting import killed_once

ROUND = re.compile(r"(1|2|5|10|20|30|50|100|200|500|6|12) (ms|s|min|h|d)")


def labels(chart: Element) -> list[str]:
    return [text.text or "" for text in chart.iter("text")]


@pytest.mark.parametrize(
    ("values_secs", "first", "last"),
    [
        ([0.013, 0.7, 77.0], "10 ms", "2 min"),
        ([3.3], "2 s", "5 s"),
        ([7.0, 7.0, 9.9], "5 s", "10 s"),
        ([60.0, 60.0], "1 min", "2 min"),
        ([0.00001, 3_000_000.0], "1 ms", "50 d"),
    ],
)
def test_the_axis_of_intervals_is_round_and_holds_all(
    values_secs: list[float], first: str, last: str
) -> None:
    chart = intervals_histogram("ram", values_secs)
    _, *ticks = labels(chart)
    assert (ticks[0], ticks[-1]) == (first, last)
    assert all(map(ROUND.fullmatch, ticks)), ticks
    assert len(ticks) <= LABELS_MAX
    assert sum(int(bar.findtext("title") or "") for bar in chart.iter("rect")) == len(values_secs)


def test_the_axis_of_time_is_round() -> None:
    texts = labels(goodput_over_time(report_run("run", killed_once())))
    assert texts == ["0", "50 %", "100 %", "0", "20 s", "40 s", "1 min", "1 min 20 s"]
