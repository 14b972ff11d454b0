"""The rules and the dashboard name metrics that agents export, and no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast import monitoring
from holdfast.observe.metrics.metric_families import METRICS
from tests.monitoring.queries import dashboard_queries

METRIC = re.compile(r"\bholdfast_\w+")
RECORDED = re.compile(r"\bholdfast:[\w:]+")
PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def exported_names() -> set[str]:
    names = set()
    for name, metric in METRICS.items():
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {name + part for part in parts}
    return names


def rules_text() -> str:
    lines = monitoring.read_file(monitoring.RULES).splitlines()
    return "\n".join(line.partition(" #")[0] for line in lines if not line.startswith("#"))


def expressions(text: str) -> str:
    """The text without the sentences for people."""
    kept = [line for line in text.splitlines() if "summary:" not in line and "descr" not in line]
    return "\n".join(kept)


def test_each_metric_of_the_files_is_exported_and_each_exported_one_is_on_the_dashboard() -> None:
    of_rules = set(METRIC.findall(expressions(rules_text())))
    of_panels = {name for query in dashboard_queries() for name in METRIC.findall(query)}
    known = exported_names()
    assert of_rules <= known
    assert of_panels <= known
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in of_panels | of_rules}
    assert shown == set(METRICS)


def test_each_recorded_name_has_its_rule() -> None:
    text = rules_text()
    made = set(re.findall(r"record: (\S+)", text))
    asked = set(RECORDED.findall(expressions(text)))
    asked |= {name for query in dashboard_queries() for name in RECORDED.findall(query)}
    assert asked == made


def test_counters_end_in_total_and_nothing_else_does() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name


def test_the_dashboard_has_a_place_for_each_panel() -> None:
    panels = json.loads(monitoring.read_file(monitoring.DASHBOARD))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool of Debian's package prometheus is not installed")
    rules = tmp_path / "rules.yml"
    rules.write_text(monitoring.read_file(monitoring.RULES))
    done = subprocess.run(
        [promtool, "check", "rules", str(rules)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_lists_each_metric() -> None:
    listed = dict(
        re.findall(r"^\| `(holdfast_\w+)(?:\{\w+\})?` \| (\w+) \|", PAGE.read_text(), re.M)
    )
    assert listed == {name: metric.kind for name, metric in METRICS.items()}
