"""Implement `holdfast stats`: print what agents count, and the files for Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast import monitoring
from holdfast.cli import output
from holdfast.cli.output import Column
from holdfast.host.wire import protocol
from holdfast.host.wire.agents_here import ask, living, no_agent_text
from holdfast.local_agent.client import AgentGoneError
from holdfast.observe.metrics.metric_families import AgentMetrics, flat
from holdfast.trainer.opening.run_access import read_only


@click.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(), required=False)
@click.option(
    "--rules",
    "file_name",
    flag_value=monitoring.RULES,
    help="Print recording and alerting rules for Prometheus.",
)
@click.option(
    "--dashboard",
    "file_name",
    flag_value=monitoring.DASHBOARD,
    help="Print a dashboard for Grafana.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def stats(directory: str | None, file_name: str | None, as_json: bool) -> None:
    """Show what the agents on this host have counted, or those of the run in DIR.

    They count from the start of the agent. Where an agent serves Prometheus, its address is shown
    too; docs/monitoring.md explains how to set it up.
    """
    if file_name is not None:
        click.echo(monitoring.read_file(file_name), nl=False)
        return
    run_id = read_only(directory).agents_id if directory is not None else None
    agents = [answer for answer in living() if run_id in (None, answer.run_id)]
    answers = [(agent, answer) for agent in agents if (answer := _ask(agent)) is not None]
    if as_json:
        output.print_json(
            {
                "agents": [
                    {
                        "run": answer.run,
                        "host": answer.host,
                        "prometheus_url": agent.prometheus_url,
                        "prometheus_problem": agent.prometheus_problem,
                        "stats": flat(answer),
                    }
                    for agent, answer in answers
                ]
            }
        )
        return
    if not answers:
        output.print_line(no_agent_text(directory))
    for number, (agent, answer) in enumerate(answers):
        if number:
            output.print_line("")
        reason = agent.prometheus_problem or "set HostNetwork(prometheus_port=…)"
        served = agent.prometheus_url or f"not served; {reason}"
        output.print_line(f"{answer.run} on {answer.host}: {served}")
        rows = [[name, f"{value:.6g}"] for name, value in flat(answer).items()]
        output.print_table([Column(""), Column("", "right")], rows)


def _ask(agent: protocol.AgentStatus) -> AgentMetrics | None:
    try:
        return ask(Path(agent.folder), "metrics", protocol.Empty(), AgentMetrics)
    except AgentGoneError:
        return None
