"""Provide the files for Prometheus and Grafana that come with Holdfast: rules and a dashboard."""

from __future__ import annotations

from importlib import resources

RULES = "rules.yml"
DASHBOARD = "dashboard.json"


def read_file(name: str) -> str:
    """Return the text of `RULES` or `DASHBOARD`."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
