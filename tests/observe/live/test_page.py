"""The live page in a real Chromium: a job over three hosts, of which one is killed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination.settings import heartbeat_for
from tests.cli.command_line import await_line
from tests.hosts import Host, wait_until
from tests.observe.live.chromium import browser, chromium_path
from tests.trainer.job import lose, seen, some_hosts, start_job

SHOTS = Path("build/live-page")
MARKUP = "gpt <img src=x onerror=alert(1)> & <b>small</b>"


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with some_hosts(3) as made:
        yield made


def page_of(one: Host, run: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """The server of a live page, and its address."""
    server = one.start("-m", "holdfast", "page", run, *options, stem="commands")
    return server, await_line(server, str(run)).rpartition(": ")[2].split()[0]


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_host_is_on_the_page_within_two_heartbeats(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    if chromium_path() is None:
        pytest.skip("Debian's package chromium is not installed: apt-get install chromium")
    run = tmp_path / MARKUP
    job = start_job(three_hosts, run, steps=100_000, interval=20, ram_interval=5, sleep=0.08)
    wait_until(lambda: len(seen(run, "committed")) > 2)
    server, url = page_of(three_hosts[0], run)
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    with browser() as tab:
        tab.open(url)
        tab.await_text("#headline", "training, 3 processes")
        tab.await_text("#survives", "1 more lost host")
        tab.await_text("#durable", "step")
        tab.await_text("#events", "manager_opened")
        tab.await_text("#categories", "productive")
        wait_until(lambda: tab.value("document.querySelectorAll('#chart rect').length") > 5)
        # A name with markup is text, and makes no element.
        assert tab.text("#run") == str(run)
        assert tab.value("document.querySelectorAll('main img, main b, h1 *').length") == 0
        # By keyboard: the link to the run, the check box, and the button.
        tab.press("Tab")
        assert tab.value("document.activeElement.className") == "skip"
        for wanted in ("saves", "pause", "events"):
            wait_until(lambda wanted=wanted: pressed_to(tab, wanted), 10)
        tab.value("document.getElementById('pause').focus()")
        tab.press("Enter")
        assert tab.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        tab.press("Enter")
        tab.value("document.getElementById('saves').focus()")
        tab.press(" ")
        tab.await_text("#events", "committed")
        tab.press(" ")
        # A screen reader's tree: landmarks, the chart as a picture with its text, the log.
        tree = tab.call("Accessibility.getFullAXTree")["nodes"]
        roles = {(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree}
        assert {("log", "Events"), ("button", "Pause"), ("main", "")} <= roles
        assert any(role == "image" and name.startswith("Median step") for role, name in roles)
        for width in (400, 1600):
            for is_dark in (False, True):
                shade = "dark" if is_dark else "light"
                tab.screenshot(SHOTS / f"live-{width}-{shade}.png", width=width, is_dark=is_dark)
                assert tab.value("document.documentElement.scrollWidth") <= width

        lost_at = time.monotonic()
        lose(three_hosts[2])
        tab.await_text("#hosts .lost", "host-c", 60)
        shown_secs = time.monotonic() - lost_at
        print(f"the page showed the lost host after {shown_secs:.2f} s")
        assert shown_secs <= 2 * heartbeat_for(3)
        tab.await_text("#headline", "1 host does not answer: host-c")
        tab.await_text("#failure", "continues from step")
        tab.screenshot(SHOTS / "lost-1600-light.png", width=1600, is_dark=False)
        tab.screenshot(SHOTS / "lost-400-dark.png", width=400, is_dark=True)
        assert {request.startswith((url, "data:")) for request in tab.requests} == {True}
        assert tab.complaints == []
        server.terminate()
        server.wait(240)
        tab.await_text("#connection", "is lost")
    job.kill()


def pressed_to(tab, wanted: str) -> bool:
    tab.press("Tab")
    return tab.value("document.activeElement.id") == wanted
