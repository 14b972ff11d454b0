"""`holdfast report` of one run, of several, and of a live one: the document has what is listed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from tests.hosts import Host, events, wait_until

CATEGORIES = {
    "productive",
    "redone",
    "restart",
    "blocked",
    "inflation",
    "compiling",
    "waiting",
    "unknown",
}


def train(run: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    """Trains a little; returns the document of the run while its manager is still open."""
    policy = FixedIntervalPolicy(5)
    with holdfast.CheckpointManager(run, framework="numpy", save_decision_policy=policy) as manager:
        start, state = manager.resume({"w": np.zeros(100)})
        for step in range(start, start + 20):
            with manager.waiting("data"):
                state["w"] += 1
            manager.save(step, state)
        manager.wait_until_finished()
        wait_until(lambda: bool(events(run, "committed")))
        capsys.readouterr()
        assert main(["report", str(run), "--json"]) == 0
        found: dict = json.loads(capsys.readouterr().out)
        manager.finish(step, state)
    return found


def test_the_document_has_each_member_also_of_a_live_run_and_several_runs_are_listed(
    one_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    live = train(first, capsys)
    train(second, capsys)
    assert live["run"] == str(first)
    assert live.keys() >= {"wall_secs", "categories", "goodput", "attempts", "failures", "tiers"}
    assert live.keys() >= {"slowest_rank", "waiting", "timeline", "notes", "restart"}
    assert live["categories"].keys() == CATEGORIES
    assert sum(live["categories"].values()) == pytest.approx(live["wall_secs"], abs=1e-5)
    assert live["tiers"]["durable"].keys() >= {"intervals", "bytes", "requests"}

    page = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--json", "--html", str(page)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["run"] for one in runs] == [str(first), str(second)]
    assert runs[0]["attempts"][0]["end"] == "closed"
    assert runs[0]["waiting"].keys() == {"data"}
    text = page.read_text()
    assert text.index(str(first)) < text.index(str(second))
    assert main(["report", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert out.index(f"{first}: goodput") < out.index(f"{second}: goodput")

    (first / "events" / "b-run.000000001.jsonl").write_bytes(b'{"event": "first_st')
    assert main(["report", str(first)]) == 0
    assert "left out: b-run.000000001.jsonl: the line is cut off" in capsys.readouterr().err
