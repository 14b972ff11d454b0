"""Write a report as one HTML file with charts, which needs no network and no script.

The document is built as a tree of elements, so that names and reasons from events are text and
never markup. Its content security policy allows its own style and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from holdfast.observe.reports import charts
from holdfast.observe.reports.model import (
    CATEGORIES,
    RESTART_PARTS,
    AttemptReport,
    RunReport,
)
from holdfast.observe.reports.words import (
    CATEGORY_WORDS,
    CAUSE_WORDS,
    RESTART_WORDS,
    TIER_WORDS,
    duration_text,
    goodput_text,
    share_text,
)
from holdfast.quantities import size_text
from holdfast.store.files.named_file import new_content

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(reports: Sequence[RunReport], path: Path) -> None:
    """Write the page of some runs; a reader of a regular file never sees half of one.

    Raises:
        InvalidArgumentError, StorageError: The file cannot be written.
    """
    with new_content(path, "write the report") as file:
        file.write(page(reports))


def page(reports: Sequence[RunReport]) -> bytes:
    """Return the page of some runs, encoded in UTF-8."""
    html = Element("html", {"lang": "en"})
    head = SubElement(html, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
    SubElement(head, "meta", {"name": "color-scheme", "content": "light dark"})
    SubElement(head, "title").text = "Holdfast: " + ", ".join(_name(report) for report in reports)
    style_sheet = resources.files("holdfast.observe.reports").joinpath("page.css")
    SubElement(head, "style").text = style_sheet.read_text(encoding="utf-8")
    main = SubElement(SubElement(html, "body"), "main")
    for report in reports:
        _add_run(main, report)
    document: bytes = tostring(html, encoding="utf-8", method="html")
    return b"<!DOCTYPE html>\n" + document


def _name(report: RunReport) -> str:
    return Path(report.run).name or report.run


def _add_run(main: Element, report: RunReport) -> None:
    SubElement(main, "h1").text = _name(report)
    SubElement(main, "p", {"class": "path"}).text = report.run
    if report.goodput is None or report.started is None:
        SubElement(main, "p").text = "There are no events of a training yet."
    else:
        _add_summary(main, report)
        _add_chart(main, "Time", charts.categories_bar(report))
        _add_categories(main, report)
        _add_chart(main, "The run over time", charts.timeline(report))
        _add_legend(main)
        _add_chart(main, "Goodput over time", charts.goodput_over_time(report))
        SubElement(
            main, "p", {"class": "legend"}
        ).text = "Thick: from the start until then. Thin: the last twentieth of the run."
        _add_failures(main, report)
        _add_tiers(main, report)
        _add_attempts(main, report)
    if report.notes:
        SubElement(main, "h2").text = "Left out"
        listed = SubElement(main, "ul")
        for note in report.notes:
            SubElement(listed, "li").text = note


def _add_summary(main: Element, report: RunReport) -> None:
    facts = SubElement(main, "dl", {"class": "facts"})
    assert report.goodput is not None
    assert report.started is not None
    lost = sum(failure.steps_lost or 0 for failure in report.failures)
    for title, value in (
        ("goodput", goodput_text(report.goodput)),
        ("time", duration_text(report.wall_secs)),
        ("steps", f"{report.steps:,}"),
        ("failures", str(len(report.failures))),
        ("steps lost", f"{lost:,}"),
        ("started", report.started.strftime("%Y-%m-%d %H:%M UTC")),
    ):
        fact = SubElement(facts, "div")
        SubElement(fact, "dt").text = title
        SubElement(fact, "dd").text = value


def _add_chart(main: Element, title: str, chart: Element) -> None:
    SubElement(main, "h2").text = title
    SubElement(main, "figure").append(chart)


def _add_legend(main: Element) -> None:
    legend = SubElement(main, "p", {"class": "legend"})
    for name in CATEGORIES:
        entry = SubElement(legend, "span")
        SubElement(entry, "i", {"class": f"c-{name}"})
        SubElement(entry, "span").text = CATEGORY_WORDS[name]


def _add_categories(main: Element, report: RunReport) -> None:
    rows = []
    for name in CATEGORIES:
        secs = report.categories[name]
        detail = ""
        if name == "restart":
            detail = _parts((RESTART_WORDS[part], report.restart[part]) for part in RESTART_PARTS)
        elif name == "waiting":
            detail = _parts(report.waiting.items())
        rows.append(
            [CATEGORY_WORDS[name], duration_text(secs), share_text(secs / report.wall_secs), detail]
        )
    table = _add_table(main, ["category", "time", "share", "of which"], rows, {1, 2})
    for name, row in zip(CATEGORIES, table.iter("tr"), strict=False):
        row[0].insert(0, Element("i", {"class": f"c-{name}"}))
        row[0][0].tail, row[0].text = row[0].text, None


def _parts(parts: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {duration_text(secs)}" for name, secs in parts if secs)


def _add_failures(main: Element, report: RunReport) -> None:
    SubElement(main, "h2").text = "Failures"
    if not report.failures:
        SubElement(main, "p").text = "None."
        return
    rows = [
        [
            str(number),
            failure.time.strftime("%Y-%m-%d %H:%M:%S"),
            CAUSE_WORDS.get(failure.cause, failure.cause),
            failure.host,
            _number(failure.steps_lost),
            _duration(failure.secs_to_next_step),
            TIER_WORDS.get(failure.source, failure.source) if failure.source else "",
            ", ".join(f"{size_text(size)} {tier}" for tier, size in failure.sources.items()),
        ]
        for number, failure in enumerate(report.failures, 1)
    ]
    titles = ["", "time (UTC)", "cause", "host", "steps lost", "to the next step"]
    _add_table(main, [*titles, "restored from", "read"], rows, {0, 4, 5})


def _add_tiers(main: Element, report: RunReport) -> None:
    SubElement(main, "h2").text = "Checkpoints"
    if not report.tiers:
        SubElement(main, "p").text = "None."
        return
    rows = [
        [
            TIER_WORDS.get(name, name),
            f"{tier.checkpoints:,}",
            _duration(tier.intervals.p50_secs),
            _duration(tier.intervals.p95_secs),
            _duration(tier.intervals.max_secs),
            "" if tier.bytes is None else size_text(tier.bytes),
            "" if tier.requests is None else f"{tier.requests:,}",
            _duration(tier.secs),
            _duration(tier.cost_secs),
        ]
        for name, tier in report.tiers.items()
    ]
    titles = ["tier", "checkpoints", "interval P50", "P95", "largest", "written", "requests"]
    _add_table(main, [*titles, "until there", "cost of one"], rows, set(range(1, 9)))
    for name, tier in report.tiers.items():
        if len(tier.intervals.values_secs) > 1:
            chart = charts.intervals_histogram(name, tier.intervals.values_secs)
            SubElement(main, "h3").text = f"Intervals: {TIER_WORDS.get(name, name)}"
            SubElement(main, "figure").append(chart)
    slowest = report.slowest_rank
    if (
        slowest is not None
        and len({attempt.host for attempt in report.attempts})
        and slowest.of_all_secs
    ):
        SubElement(main, "p").text = (
            f"Slowest: rank {slowest.rank} on {slowest.host} took "
            f"{duration_text(slowest.part_secs)} for its part, "
            f"the median rank {duration_text(slowest.of_all_secs)}."
        )


def _add_attempts(main: Element, report: RunReport) -> None:
    SubElement(main, "h2").text = "Attempts"
    rows = [
        [
            str(attempt.attempt),
            attempt.host,
            _number(attempt.first_step),
            _number(attempt.last_step),
            duration_text(attempt.wall_secs),
            share_text(attempt.categories["productive"] / attempt.wall_secs)
            if attempt.wall_secs
            else "",
            _duration(attempt.quiet_step_secs),
            CAUSE_WORDS.get(attempt.end, attempt.end) if attempt.end != "closed" else "closed",
            _launchers(attempt),
        ]
        for attempt in report.attempts
    ]
    titles = ["attempt", "host", "first step", "last", "time", "productive", "step", "end"]
    titles.append("started by")
    _add_table(main, titles, rows, {0, 2, 3, 4, 5, 6})


def _launchers(attempt: AttemptReport) -> str:
    """Return what has started an attempt's processes, the outermost first."""
    restarts = attempt.restarts
    names = reversed(attempt.launchers)
    return ", ".join(f"{n} (restart {restarts[n]})" if restarts.get(n) else n for n in names)


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _duration(secs: float | None) -> str:
    return "" if secs is None else duration_text(secs)


def _add_table(
    main: Element, titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: set[int]
) -> Element:
    """Add a table, and return its body; columns of `numeric` are aligned on the right."""
    frame = SubElement(main, "div", {"class": "wide"})
    table = SubElement(frame, "table")
    header = SubElement(SubElement(table, "thead"), "tr")
    for index, title in enumerate(titles):
        SubElement(header, "th", _style(index, numeric)).text = title
    body = SubElement(table, "tbody")
    for row in rows:
        line = SubElement(body, "tr")
        for index, cell in enumerate(row):
            SubElement(line, "td", _style(index, numeric)).text = cell
    return body


def _style(index: int, numeric: set[int]) -> dict[str, str]:
    return {"class": "n"} if index in numeric else {}
