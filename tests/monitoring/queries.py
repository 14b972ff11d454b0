"""The queries of the dashboard's panels."""

from __future__ import annotations

import json
from collections.abc import Iterator

from holdfast import monitoring


def dashboard_queries() -> Iterator[str]:
    for panel in json.loads(monitoring.read_file(monitoring.DASHBOARD))["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def filled(query: str) -> str:
    """The query as Grafana sends it for all runs, for scrapes each second."""
    return query.replace("$__rate_interval", "10s").replace("$run", ".+")
