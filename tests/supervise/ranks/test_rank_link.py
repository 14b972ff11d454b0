"""What is wrong with the way in which a program with lost ranks is started is said at once."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest
from click.testing import CliRunner

from holdfast.cli.run import run
from holdfast.environment import MEMBER_VARIABLE
from holdfast.errors import InvalidArgumentError, ProcessLostError
from holdfast.trainer.process.rank_link import (
    Broken,
    Lines,
    RankLink,
    Ready,
    Released,
    Report,
    show_interruption_briefly,
)


def test_a_program_that_holdfast_run_has_not_started_is_told_how_to_start() -> None:
    with pytest.raises(InvalidArgumentError, match=r"found none .* `holdfast run --nproc N --sp"):
        RankLink.from_environment({}, print)


def test_a_worker_of_torchrun_is_told_that_nothing_survives_there() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "7", "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(InvalidArgumentError, match="torchrun, which ends all of them"):
        RankLink.from_environment(variables, print)


def test_a_second_call_in_one_process_is_told_so() -> None:
    with pytest.raises(InvalidArgumentError, match="no open socket of this process"):
        RankLink.from_environment({MEMBER_VARIABLE: "987"}, print)


def test_a_ctrl_c_that_ends_a_rank_is_one_line_and_other_errors_are_shown_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    show_interruption_briefly(lambda: "rank 1")
    bad = ValueError("bad batch")
    for error in (KeyboardInterrupt(), bad):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "holdfast: rank 1: interrupted\n"
    assert shown == [bad]


def test_orders_arrive_in_their_order_and_a_broken_generation_also_at_once() -> None:
    ours, theirs = socket.socketpair()
    variables, broken, told = {MEMBER_VARIABLE: str(theirs.detach())}, [], threading.Event()

    def on_broken(order: Broken) -> None:
        broken.append(order)
        told.set()

    link = RankLink.from_environment(variables, on_broken)
    assert variables == {}
    launcher = Lines(ours, Report)
    link.report(Ready())
    launcher.send(Broken(3))
    launcher.send(Released(has_finished=True))
    assert told.wait(60.0)
    assert broken == [Broken(3)]
    assert [link.poll(60.0), link.poll(60.0), link.poll(0.0)] == [Broken(3), Released(True), None]
    assert [*launcher.receive()] == [Ready()]
    ours.close()
    with pytest.raises(
        ProcessLostError, match="`holdfast run`, which divides the ranks, has ended"
    ):
        link.poll(60.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spares", "1"], "--spare-hosts and --min-ranks are options of --nproc"),
        (["--nproc", "2", "--spare-hosts", "1"], "--spare-hosts is an option of --hosts"),
        (["--nproc", "2", "--standby"], "--standby is for one process"),
        (["--nproc", "2", "--min-ranks", "3"], "--min-ranks: expected at most 2, found 3"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(run, [*options, "--", "true"])
    assert result.exit_code == 2
    assert message in result.output
    assert MEMBER_VARIABLE not in os.environ
