"""The axes of a report's charts have round ticks, with room for their labels."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from holdfast.observe.reports.charts import LABELS_MAX, goodput_over_time, intervals_histogram
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.page import page
from tests.observe.live.chromium import browser, chromium_path
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


READABLE_PX = 11.0
"""Of a line of text; letters of 12 pixels make a line of 13 or more."""


@pytest.mark.soak
def test_labels_are_readable_on_a_screen_of_420_pixels(tmp_path: Path) -> None:
    if chromium_path() is None:
        pytest.skip("Debian's package chromium is not installed: apt-get install chromium")
    (tmp_path / "page.html").write_bytes(page([report_run("run", killed_once())]))
    with browser() as tab:
        tab.open((tmp_path / "page.html").as_uri())
        tab.screenshot(tmp_path / "page.png", width=420, is_dark=False)
        heights = tab.value(
            "[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) > 10
        assert min(heights) >= READABLE_PX, heights
        # A chart is scrolled, and the page is not.
        assert tab.value("document.documentElement.scrollWidth") <= 420
