"""Serve an agent's metrics to Prometheus, once a trainer asks for it.

`prometheus_client` and aiohttp are imported only then: they would double the time of an agent's
start. Metrics that cannot be served are a warning for the trainer; the training goes on.

See docs/decisions/0035.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.host.wire.protocol import MetricsAddress
from holdfast.observe.metrics.metric_families import AgentMetrics, MetricFamily
from holdfast.peers.address import names_loopback
from holdfast.peers.config import listen

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client.core import Metric

PATH = "/metrics"
SHUTDOWN_SECS = 1.0

log = logging.getLogger(__name__)


class MetricsServer:
    """The server of one agent; owned by the event loop. It serves at one address at a time."""

    def __init__(self, gather: Callable[[], AgentMetrics]) -> None:
        self._gather = gather
        self.url: str | None = None
        """Where metrics are served; None: nowhere."""
        self.problem: str | None = None
        """Why they are not served where a trainer asked for it; None: they are, or none did."""
        self._runner: web.AppRunner | None = None
        self._at: MetricsAddress | None = None

    async def open(self, at: MetricsAddress) -> str | None:
        """Serve at that address; return why that is not possible, or None.

        An address that is served already stays as it is.
        """
        if self._runner is not None and at == self._at:
            return None
        self.problem = None
        try:
            await self._open(at)
        except HoldfastError as error:
            reason = str(error)
        except ImportError as error:
            reason = f"{error}; install holdfast-checkpoint[prometheus]"
        else:
            return None
        self.problem = reason
        log.warning("serves no metrics: %s", reason)
        return f"the agent serves no metrics: {reason}"

    async def close(self) -> None:
        """End the server, and all connections to it."""
        runner, self._runner, self._at = self._runner, None, None
        self.url = None
        if runner is not None:
            await runner.cleanup()

    async def _open(self, at: MetricsAddress) -> None:
        from aiohttp import web
        from prometheus_client import CollectorRegistry
        from prometheus_client.aiohttp import make_aiohttp_handler

        await self.close()
        listener = listen(at.address, at.port, "serve metrics")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._gather))
        host, port = listener.getsockname()[:2]
        is_loopback = ipaddress.ip_address(host).is_loopback
        app = web.Application(middlewares=[web.middleware(_loopback_only)] if is_loopback else [])
        app.router.add_get(PATH, make_aiohttp_handler(registry))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECS)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        self._runner, self._at = runner, at
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}{PATH}"
        log.info("serves metrics at %s", self.url)


async def _loopback_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests that name another host, which a page of another site makes a browser do."""
    from aiohttp import web

    if names_loopback(request.headers.get("Host", "")):
        return await handler(request)
    return web.Response(status=403, text="expected a loopback host in the address\n")


class _Collector:
    """Gathers the metrics at each scrape, as `prometheus_client` asks its collectors."""

    def __init__(self, gather: Callable[[], AgentMetrics]) -> None:
        self._gather = gather

    def collect(self) -> Iterator[Metric]:
        metrics = self._gather()
        constant = {"run": metrics.run, "host": metrics.host}
        for family in metrics.families:
            yield exported(family, constant)


def exported(family: MetricFamily, constant: dict[str, str]) -> Metric:
    """Return a metric as `prometheus_client` writes it, with constant labels."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )

    own = list(family.samples[0].labels)
    labels = [*constant, *own]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=labels)
        for sample in family.samples:
            buckets = [
                ("+Inf" if bound is None else repr(bound), float(count))
                for bound, count in sample.buckets
            ]
            histogram.add_metric(_values(constant, sample.labels), buckets, sample.value)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily = kind(family.name, family.text, labels=labels)
    for sample in family.samples:
        metric.add_metric(_values(constant, sample.labels), sample.value)
    assert isinstance(metric, Metric)
    return metric


def _values(constant: dict[str, str], labels: dict[str, str]) -> list[str]:
    return [*constant.values(), *labels.values()]
