"""`holdfast watch` and `holdfast page` of a run that trains, has ended, or is none."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.trainer.run_copies import copy_run
from tests.cli.command_line import answer, await_line, holdfast, start_training
from tests.hosts import Host, await_events, ending, wait_until
from tests.trainer.written_tiers import train_alone


@pytest.fixture
def training(one_host: Host, tmp_path: Path) -> Path:
    run = tmp_path / "run [bold]x[/bold]"
    trainer = start_training(one_host, run, steps=100_000, sleep=0.01, every=50)
    wait_until(lambda: any(held.committed for a in one_host.agents() for held in a.held))
    await_events(run, "manager_opened", count=1)
    assert trainer.poll() is None
    return run


def test_the_state_is_printed_once_where_there_is_no_terminal(
    one_host: Host, training: Path
) -> None:
    out = holdfast(one_host, "watch", training).stdout
    assert f"{training}\ntraining, 1 process\n" in out
    assert "step time: " in out
    assert "durable steps: " in out
    # A newer checkpoint may be in RAM alone.
    assert re.search(r"survives: (.*; )?any loss, from step ", out)
    assert "manager_opened" in out


def test_on_a_terminal_it_refreshes_until_it_is_interrupted(one_host: Host, training: Path) -> None:
    ours, theirs = pty.openpty()
    with ending(
        subprocess.Popen(
            [sys.executable, "-m", "holdfast", "watch", str(training)],
            env=one_host.environment | {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
    ) as watching:
        os.close(theirs)
        shown = b""
        while shown.count(b"training, 1 process") < 3:
            shown += os.read(ours, 65536)
        watching.send_signal(signal.SIGINT)
        while watching.poll() is None:
            try:
                os.read(ours, 65536)
            except OSError:
                break
        _, error = watching.communicate(timeout=240)
    os.close(ours)
    assert (watching.returncode, error) == (130, b"\ninterrupted\n")


def test_the_page_is_served_until_it_is_interrupted(one_host: Host, training: Path) -> None:
    server = one_host.start("-m", "holdfast", "page", training, stem="commands")
    url = await_line(server, str(training)).rpartition(": ")[2].split()[0]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b"<title>Holdfast</title>" in answer.read()
    with urllib.request.urlopen(f"{url}stream", timeout=10) as stream:
        while not (line := stream.readline()).startswith(b'data: {"run"'):
            pass
        assert b'"headline":"training, 1 process"' in line
    server.send_signal(signal.SIGINT)
    _, error = server.communicate(timeout=240)
    assert (server.returncode, error) == (130, "\ninterrupted\n")


def test_the_address_of_the_page_is_a_document(one_host: Host, training: Path) -> None:
    server = one_host.start("-m", "holdfast", "page", training, "--json", stem="commands")
    assert server.stdout is not None
    document = json.loads("".join(server.stdout.readline() for _ in range(4)))
    assert document["run"] == str(training)
    with urllib.request.urlopen(document["url"], timeout=10) as answered:
        assert b"<title>Holdfast</title>" in answered.read()
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=240) == ("", "\ninterrupted\n")


def test_another_address_than_loopback_needs_a_token(
    one_host: Host, training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("short\n")
    for options, code, reason in (
        (["--address", "127.0.0.2"], 2, "without a token"),
        (["--token-file", str(token)], 2, "at least 16"),
        (["--token-file", str(tmp_path / "none")], 1, "No such file"),
    ):
        assert main(["page", str(training), *options]) == code
        assert reason in capsys.readouterr().err
    assert (
        "at least 16" in holdfast(one_host, "page", training, "--token-file", token, code=2).stderr
    )
    token.write_text("0123456789abcdef\n")
    server = one_host.start(
        *("-m", "holdfast", "page", training, "--address", "127.0.0.2", "--token-file", token),
        stem="commands",
    )
    url = await_line(server, str(training)).rpartition(": ")[2].split()[0]
    assert url.startswith("http://127.0.0.2:")
    plain = url.partition("?")[0]
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(plain, timeout=10)
    assert refusal.value.code == 401
    refusal.value.close()


def test_a_run_that_has_ended_and_a_place_without_a_run(
    one_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trainer = start_training(one_host, run, steps=3)
    assert trainer.wait(240) == 0
    await_events(run, "trainer_left", count=1)
    out = holdfast(one_host, "watch", run).stdout
    assert "step 2 · attempt 1 · 0 failures" in out
    view = answer(one_host, "watch", run)
    assert (view["step"], view["attempt"], view["failures"]) == (2, 1, 0)
    for command in ("watch", "page"):
        assert main([command, str(tmp_path / "none")]) == 1
        assert "error: " in capsys.readouterr().err


def test_durable_steps_are_listed_where_there_are_no_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(place: Path) -> str:
        capsys.readouterr()
        assert main(["watch", str(place), "--once"]) == 0
        return capsys.readouterr().out

    run, copy = tmp_path / "run", tmp_path / "copy"
    train_alone(run, 1, 2, 3)
    copy_run(run, copy)
    assert "durable steps: 3, 2, 1\n" in shown(copy)
    (copy / "events" / "host-a").mkdir(parents=True)
    (copy / "events" / "host-a" / "000000001.jsonl").write_bytes(b"\xff\xfe not an event\n")
    assert "durable steps: 3, 2, 1\n" in shown(copy)
    for record in (copy / "attempts").iterdir():
        record.write_bytes(b"damaged")
    out = shown(copy)
    assert "durable steps: not known\n" in out
    assert "\nnot known: which steps are durable: " in out
