"""What a program that sets up no logging sees of Holdfast in its terminal."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

from holdfast import RemoteTier
from holdfast.host.wire.control_block import create_cells
from holdfast.host.wire.protocol import Detach, Detached
from holdfast.trainer.opening.agent_place import AgentPlace
from holdfast.trainer.process.terminal import opening_text, staying_text
from tests import prepared
from tests.attempts import attempt_id
from tests.hosts import Host, ending
from tests.trust.in_process import InProcessHost

LOGGED = """
import logging
{before}
from holdfast.trainer.process.terminal import show_log
show_log({rank}, {count})
{after}
log = logging.getLogger("holdfast.trainer.save.saver")
log.debug("one %d", 1)
log.info("two")
log.warning("three")
"""
TRAINING = """
import os, signal, sys
import numpy as np
from holdfast import CheckpointManager, RamTier
from holdfast.policy.save_decision_policy import FixedIntervalPolicy

run, steps, stops_at, asks = sys.argv[1], *map(int, sys.argv[2:])
with CheckpointManager(
    run, framework="numpy", save_decision_policy=FixedIntervalPolicy(1), ram=RamTier(linger_secs=60)
) as manager:
    start, state = manager.resume({"w": np.zeros(1000)})
    for step in range(start, steps):
        if step == stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.save(step, state)
        if asks and manager.reached_preemption(step):
            break
    if step == 2:
        manager.wait_until_finished()
        os._exit(1)
"""


def printed(script: str, *arguments: object, **variables: str) -> list[str]:
    """Return the lines that a script writes to standard error."""
    known = {name: value for name, value in os.environ.items() if name != "HOLDFAST_LOG"}
    command = ["-c", textwrap.dedent(script), *map(str, arguments)]
    with ending(prepared.start("numpy", command, known | variables)) as process:
        _, errors = process.communicate(timeout=240)
    return errors.splitlines()


BASIC = "logging.basicConfig(format='own %(levelname)s %(message)s')"
OWN_HANDLER = "logging.getLogger('holdfast').addHandler(logging.StreamHandler())"
SHOWN: dict[str, tuple[dict[str, object], str, list[str]]] = {
    "by default": ({}, "", ["holdfast: two", "holdfast: warning: three"]),
    "debug": ({}, "debug", ["holdfast: one 1", "holdfast: two", "holdfast: warning: three"]),
    "warning": ({}, "warning", ["holdfast: warning: three"]),
    "off": ({}, "off", []),
    "a rank of several": (
        {"rank": 3, "count": 8},
        "warning",
        ["holdfast rank 3: warning: three"],
    ),
    "a handler at the root, as imports add it": (
        {"before": BASIC},
        "",
        ["own INFO two", "own WARNING three"],
    ),
    "logging set up before, with a level": (
        {"before": BASIC + "; logging.getLogger().setLevel(logging.ERROR)"},
        "",
        [],
    ),
    "a handler at the root, and a level": (
        {"before": BASIC},
        "info",
        ["own INFO two", "own WARNING three"],
    ),
    "a handler of its own": ({"before": OWN_HANDLER}, "", ["three"]),
    "logging set up after": ({"after": BASIC}, "", ["own INFO two", "own WARNING three"]),
    "logging set up after, with a level": (
        {"after": BASIC + "; logging.getLogger().setLevel(logging.ERROR)"},
        "",
        # The first line shows that the program has set up its logging.
        ["own INFO two"],
    ),
    "a level of the program": (
        {"before": "logging.getLogger('holdfast').setLevel(logging.WARNING)"},
        "",
        ["holdfast: warning: three"],
    ),
    "opened twice": (
        {"after": "show_log(0, 1)"},
        "",
        ["holdfast: two", "holdfast: warning: three"],
    ),
    "an unknown level": (
        {},
        "loud",
        [
            "holdfast: warning: HOLDFAST_LOG is 'loud', expected one of debug, info, warning, off; "
            "info is used",
            "holdfast: two",
            "holdfast: warning: three",
        ],
    ),
}


@pytest.mark.parametrize(("changes", "chosen", "lines"), SHOWN.values(), ids=SHOWN)
def test_each_line_is_shown_once_and_only_what_is_wanted(
    changes: dict[str, object], chosen: str, lines: list[str]
) -> None:
    script = LOGGED.format(**({"before": "", "after": "", "rank": 0, "count": 1} | changes))
    assert printed(script, **({"HOLDFAST_LOG": chosen} if chosen else {})) == lines


def test_an_import_that_adds_a_handler_hides_no_line() -> None:
    script = LOGGED.format(before="import grain, logging", after="", rank=0, count=1)
    lines = printed(script.replace("import logging", "", 1))
    assert [line for line in lines if "two" in line or "three" in line] == [
        "INFO:holdfast.trainer.save.saver:two",
        "WARNING:holdfast.trainer.save.saver:three",
    ]


def test_a_terminal_that_is_closed_is_no_error() -> None:
    script = LOGGED.format(before="import sys", after="sys.stderr.close()", rank=0, count=1)
    assert printed(script + "\nprint('end', file=sys.__stdout__)") == []


def train(host: Host, run: Path, steps: int, stops_at: int = -1, asks: int = 1) -> list[str]:
    lines = printed(TRAINING, run, steps, stops_at, asks, **host.environment)
    return [re.sub(r"[\d.]+ s\)", "T s)", line) for line in lines]


def test_a_start_a_restart_and_a_preemption_have_one_line_each(
    one_host: Host, tmp_path: Path
) -> None:
    run, ram = tmp_path / "run", one_host.folder
    goes_to = (
        f"checkpoints go to RAM ({ram}) and disk; a lost process costs the steps since the last "
        "save, a lost host those since the last one on disk"
    )
    # Each of its three steps is saved; it ends without closing the manager.
    assert train(one_host, run, 3) == [f"holdfast: opened {run}: a new run; {goes_to}"]
    assert train(one_host, run, 9, stops_at=6) == [
        f"holdfast: opened {run}: attempt 2, its newest checkpoint is of step 2; {goes_to}",
        "holdfast: resumed from step 2 of attempt 1 (8.0 kB from RAM, T s)",
        "holdfast: preempted: step 6 is being saved as the last one",
    ]


@pytest.mark.parametrize(
    ("ram", "has_copies", "loss"),
    [
        (None, False, "; a failure costs the steps since the last save"),
        (
            "r",
            False,
            "a lost process costs the steps since the last save, a lost host those since the last "
            "one on disk",
        ),
        (
            "r",
            True,
            "a lost process costs the steps since the last save, a lost host those since the last "
            "one that another host has",
        ),
    ],
)
def test_the_line_about_an_opened_run_says_what_a_loss_would_cost(
    ram: str | None, has_copies: bool, loss: str, tmp_path: Path
) -> None:
    place = AgentPlace(
        folder=tmp_path / "agent",
        control=create_cells(tmp_path / "words"),
        attempt=attempt_id(1),
        origin=None,
        seat=0,
        ram_folder=Path(ram) if ram else None,
        cursor=0,
    )
    assert opening_text("runs/gpt", place, None, has_copies=has_copies).endswith(loss)
    text = opening_text("runs/gpt", place, RemoteTier("s3://bucket/gpt"), has_copies=has_copies)
    assert text.endswith(f"{loss}, a lost disk those since the last one in s3://bucket/gpt")
    place.control.close()


def left(**changes: object) -> Detached:
    common = {"is_last": True, "pid": 7, "ram_bytes": 16_000_000, "is_writing": False}
    return Detached(**(common | {"leaves_in_secs": 600.0} | changes))


@pytest.mark.parametrize(
    ("changes", "until"),
    [
        ({}, "for 10 min"),
        ({"is_writing": True, "leaves_in_secs": None}, "until its checkpoints are durable"),
        ({"leaves_in_secs": 5.0}, None),
        ({"leaves_in_secs": None}, None),
    ],
)
def test_an_agent_that_stays_behind_is_named_with_its_memory_and_its_end(
    changes: dict[str, object], until: str | None
) -> None:
    line = f"the agent (process 7) stays {until}, with 16.0 MB of RAM for the next start; "
    text = staying_text("runs/gpt", left(**changes))
    assert text == (until and line + "`holdfast stop runs/gpt` ends it")


def test_an_agent_that_slurm_ends_with_the_step_is_not_said_to_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    text = staying_text("runs/gpt", left(leaves_in_secs=600.0))
    assert text == (
        "Slurm ends the agent (process 7) with the job step, and 16.0 MB of RAM stay for the next "
        "start on this host; `holdfast clean` frees them"
    )
    assert staying_text("runs/gpt", left(leaves_in_secs=1.0)) is None


def test_the_answer_to_a_detaching_trainer_describes_its_agent(
    tmp_path: Path,
) -> None:
    agent = InProcessHost(tmp_path)
    try:
        agent.start_agent()
        agent.agent.trainers.job.linger_secs = 600.0
        trainer = agent.attach()
        assert agent.service is not None
        request = Detach(group=trainer.group, rank=0)
        found = agent.call(agent.service.detach(request, trainer.process.pid))
        assert (found.is_last, found.pid, found.is_writing) == (True, os.getpid(), False)
    finally:
        agent.close()


def test_a_loop_that_never_asks_sees_a_warning_by_default(one_host: Host, tmp_path: Path) -> None:
    lines = train(one_host, tmp_path / "run", 12, stops_at=5, asks=0)
    (warning,) = [line for line in lines if "warning" in line]
    assert warning.startswith(
        "holdfast: warning: a preemption was announced and step 5 is saved for it"
    )
    assert "reached_preemption(step)" in warning
