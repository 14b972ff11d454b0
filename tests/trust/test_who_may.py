"""Check access: an agent serves its own user, and follows no path that another user made.

The tests have two users, one of which is a stranger with every opportunity: open mode bits, or a
place that was taken before its owner came.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.host.wire.agent_directory import RAM, WORDS
from holdfast.local_agent.place import LOCK, SOCKET
from tests.hosts import is_running, wait_until
from tests.manifests import manifest_path
from tests.trust.figures import tell
from tests.trust.in_process import RUN_ID
from tests.trust.who_may_users import (
    HOST,
    OWNER,
    STRANGER,
    USER_NAMES,
    Users,
    open_to_all,
    users,
    why_not,
)

Way = Callable[[Users], None]
WAYS: list[Way] = []
QUICK: list[Way] = []

READ = "import sys; print(open(sys.argv[1], 'rb').read(1))"
LIST = "import os, sys; print(os.listdir(sys.argv[1]))"
CALLS = [
    ("status", "{}"),
    ("job", "{}"),
    ("stop", "{}"),
    ("delete", '{"ids":[[1,1]]}'),
    ("request", "{}"),
    ("detach", '{"group":"group","rank":0}'),
]


def way(*arguments: object, is_quick: bool = True) -> Callable[[Way], Way]:
    """One thing that a stranger may try, with these arguments; not in each run if not quick."""

    def noted(function: Way) -> Way:
        made = functools.partial(function, **dict([arguments])) if arguments else function
        WAYS.append(made)
        if is_quick:
            QUICK.append(made)
        return function

    return noted


def claim(made: Way) -> str:
    """What a way shows."""
    if isinstance(made, functools.partial):
        values = [USER_NAMES.get(value, value) for value in made.keywords.values()]
        return f"{made.func.__name__}-{'-'.join(map(str, values))}"
    return made.__name__


def agent_folder(two: Users) -> Path:
    """Where the owner's agent is to live."""
    return two.ram / f"{RUN_ID}-{HOST}"


@way()
def another_user_is_refused_by_credentials_where_every_mode_bit_is_open(two: Users) -> None:
    said = two.trainer("save", two.run)
    assert said["told"] == "committed", said
    open_to_all(Path(said["folder"]))
    for uid in (STRANGER, 0):
        for name, body in CALLS:
            code, answer = two.asked(uid, said["folder"], name, body)
            assert code == 403
            assert f"this agent serves user {OWNER}, not user {uid}" in answer
    assert is_running(said["pid"])
    assert manifest_path(two.run, 1).exists()
    code, _ = two.asked(OWNER, said["folder"], "status")
    assert code == 200


@way()
def another_user_can_open_nothing_of_the_agents(two: Users) -> None:
    folder = Path(two.trainer("save", two.run)["folder"])
    slots = list((folder / RAM / "slots").iterdir())
    assert slots
    private = [folder / name for name in (LOCK, WORDS, SOCKET)] + slots
    for path in [folder.parent, folder, folder / RAM, *private]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert path.stat().st_uid == OWNER, path
    files = private[:2] + slots
    for script, path in [(LIST, folder.parent), *((READ, path) for path in files)]:
        with two.popen(STRANGER, "-c", script, path) as process:
            assert "PermissionError" in process.communicate(timeout=240)[1], path
    # The folder alone opened: what is in it is still the owner's.
    folder.parent.chmod(0o777)
    folder.chmod(0o777)
    for script, path in [(LIST, folder / RAM), *((READ, path) for path in files)]:
        with two.popen(STRANGER, "-c", script, path) as process:
            assert "PermissionError" in process.communicate(timeout=240)[1], path


@way("mode", 0o777)
@way("mode", 0o700)
def a_root_that_a_stranger_made_first_is_refused_by_name(two: Users, mode: int) -> None:
    two.make_folder(two.ram, STRANGER, mode)
    said = two.trainer("start", two.run)
    assert said["error"] == "StorageError"
    assert str(two.ram) in said["message"]
    assert f"user {OWNER}, found one of user {STRANGER}" in said["message"]
    assert list(two.ram.iterdir()) == []


@way()
def the_default_root_is_refused_by_name_where_a_stranger_has_it(two: Users) -> None:
    root = Path("/dev/shm") / f"holdfast-{OWNER}"
    two.make_folder(root, STRANGER, 0o777)
    try:
        said = two.trainer("start", two.run, HOLDFAST_RAM="")
        assert said["error"] == "StorageError"
        assert str(root) in said["message"]
        assert list(root.iterdir()) == []
    finally:
        shutil.rmtree(root)


@way("at", "root")
@way("at", "folder")
def a_link_to_the_owners_own_folder_is_not_followed(two: Users, at: str) -> None:
    mine = two.make_folder(two.place / "mine", OWNER)
    if at == "root":
        two.make_link(two.ram, mine, STRANGER)
    else:
        two.make_folder(two.ram, OWNER)
        two.make_link(agent_folder(two), mine, STRANGER)
    said = two.trainer("start", two.run)
    assert said["error"] == "StorageError", said
    assert list(mine.iterdir()) == []


@way("is_owners_folder", False)
@way("is_owners_folder", True)
def an_agent_of_a_stranger_is_told_nothing(two: Users, is_owners_folder: bool) -> None:
    two.make_folder(two.ram, OWNER, 0o777)
    folder = two.make_folder(agent_folder(two), OWNER if is_owners_folder else STRANGER, 0o777)
    with two.fake_agent(folder) as fake:
        said = two.trainer("call", folder)
        assert said["error"] == "AgentGoneError"
        assert f"of user {STRANGER}, expected user {OWNER}" in said["message"]
        assert fake.communicate(timeout=240)[0] == "0\n"


@way()
def a_stranger_who_listens_in_a_folder_of_its_own_is_refused_by_name(two: Users) -> None:
    two.make_folder(two.ram, OWNER, 0o777)
    folder = two.make_folder(agent_folder(two), STRANGER, 0o777)
    with two.fake_agent(folder) as fake:
        said = two.trainer("start", two.run)
        assert said["error"] == "StorageError"
        assert str(folder) in said["message"]
        assert fake.communicate(timeout=240)[0] == "0\n"


@way()
def a_socket_that_a_stranger_put_in_the_place_of_the_agents_gets_nothing(two: Users) -> None:
    """The owner's agent comes instead, in its own folder."""
    two.make_folder(two.ram, OWNER, 0o777)
    folder = two.make_folder(agent_folder(two), OWNER, 0o777)
    with two.fake_agent(folder) as fake:
        said = two.trainer("save", two.run)
        assert said["told"] == "committed", said
        assert said["pid"] != fake.pid
        assert fake.communicate(timeout=240)[0] == "0\n"


@way()
def a_link_does_not_lead_to_another_agent_of_the_owner(two: Users) -> None:
    """Else one run would be saved into another."""
    folder = Path(two.trainer("start", two.run)["folder"])
    link = folder.with_name("another-run-host-a")
    two.make_link(link, folder, STRANGER)
    said = two.trainer("call", link)
    assert said["error"] == "AgentGoneError", said


@way("laid", "words.unfinished", is_quick=False)
@way("laid", "group.unfinished")
@way("laid", LOCK, is_quick=False)
def links_that_lie_in_the_agents_folder_are_not_written_through(two: Users, laid: str) -> None:
    two.make_folder(two.ram, OWNER)
    folder = two.make_folder(agent_folder(two), OWNER)
    precious = two.make_file(two.place / "precious", OWNER)
    two.make_link(folder / laid, precious, STRANGER)
    said = two.trainer("save", two.run)
    # The agent does without the group's file; without the others it is none.
    if laid != "group.unfinished":
        assert said["error"] == "AgentUnavailableError", said
    assert precious.read_text() == "precious\n"


@way("owner", OWNER, is_quick=False)
@way("owner", STRANGER)
def a_log_that_is_a_link_is_not_written_through(two: Users, owner: int) -> None:
    precious = two.make_file(two.place / "precious", OWNER)
    events = two.make_folder(two.run / "events", OWNER)
    two.make_link(events / f"agent-{HOST}.log", precious, owner)
    said = two.trainer("start", two.run)
    assert said["error"] == "AgentUnavailableError"
    assert f"log into {events}/agent-{HOST}.log" in said["message"]
    assert precious.read_text() == "precious\n"


@way(is_quick=False)
def a_log_that_is_a_pipe_holds_nobody_up(two: Users) -> None:
    events = two.make_folder(two.run / "events", OWNER)
    os.mkfifo(events / f"agent-{HOST}.log")
    os.chown(events / f"agent-{HOST}.log", OWNER, OWNER)
    said = two.trainer("start", two.run)
    assert said["error"] == "AgentUnavailableError"
    assert f"log into {events}/agent-{HOST}.log" in said["message"]


@way()
def events_that_are_links_are_not_written_through(two: Users) -> None:
    precious = two.make_file(two.place / "precious", OWNER)
    events = two.make_folder(two.run / "events", OWNER)
    for series in ("run", "saves"):
        two.make_link(events / f"{HOST}-{series}.000000001.jsonl", precious, STRANGER)
    said = two.trainer("save", two.run)
    assert said["told"] == "committed", said
    log = events / f"agent-{HOST}.log"
    wait_until(lambda: "events: cannot write" in log.read_text())
    assert precious.read_text() == "precious\n"


@way("name", "events", is_quick=False)
@way("name", "checkpoints")
@way("name", "attempts", is_quick=False)
def a_folder_of_the_run_that_is_a_link_is_not_followed(two: Users, name: str) -> None:
    elsewhere = two.make_folder(two.place / "elsewhere", STRANGER, 0o777)
    two.make_link(two.run / name, elsewhere, STRANGER)
    said = two.trainer("save", two.run)
    if name == "checkpoints":
        assert (said.get("told"), said.get("error")) in (("failed", None), (None, "StorageError"))
        assert "symbolic link" in said.get("why", "") + said.get("message", "")
    else:
        assert said["error"] in ("AgentUnavailableError", "StorageError"), said
    assert list(elsewhere.iterdir()) == []


@way(is_quick=False)
def a_run_in_a_strangers_folder_is_not_led_elsewhere(two: Users) -> None:
    """The stranger owns the run's directory, lets all write there, and laid links in it."""
    run = two.make_folder(two.place / "theirs", STRANGER, 0o777)
    mine = two.make_folder(two.place / "mine", OWNER)
    precious = two.make_file(mine / "precious", OWNER)
    two.make_link(run / "events", mine, STRANGER)
    two.make_link(run / "checkpoints", mine, STRANGER)
    two.make_link(run / "attempts", mine, STRANGER)
    said = two.trainer("save", run)
    assert said["error"] in ("AgentUnavailableError", "StorageError"), said
    assert list(mine.iterdir()) == [precious]
    assert precious.read_text() == "precious\n"


@way()
def root_is_refused_like_any_other_user(two: Users) -> None:
    """The memory of a run is its user's alone; root can become that user."""
    folder = two.trainer("start", two.run)["folder"]
    said = two.trainer("call", folder, uid=0)
    assert said["error"] == "AgentGoneError"
    assert f"of user {OWNER}, expected user 0" in said["message"]


@way("uid", 0)
@way("uid", STRANGER)
def a_live_run_is_not_taken_over_by_another_user_of_the_host(two: Users, uid: int) -> None:
    """Each has an agent of its own, with the same host name; the run is open to both."""
    other_ram = two.make_folder(two.place / "other", uid)
    script = two.place / "code" / "tests" / "trust" / "who_may_trainer.py"
    with two.popen(OWNER, script, "train", two.run) as training:
        try:
            assert json.loads(training.stdout.readline()) == {"attempt": 1}
            for path in (two.run, *two.run.rglob("*")):
                # The agent renames and removes files meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    path.chmod(0o777)
            said = two.trainer("save", two.run, uid=uid, HOLDFAST_RAM=str(other_ram))
            assert said["error"] == "RunBusyError", said
            holder = f"attempt 1 is live on host {HOST} (process {training.pid} of user {OWNER})"
            assert holder in said["message"]
            assert "s; stop it first, or open with takeover=True" in said["message"]
            assert [one.name for one in (two.run / "attempts").glob("*1.json")]
            assert not [*(two.run / "attempts").glob("*2.json")]
            said = two.trainer("takeover", two.run, uid=uid, HOLDFAST_RAM=str(other_ram))
            assert said == {"attempt": 2}
        finally:
            training.kill()


@pytest.fixture(autouse=True)
def two_users() -> None:
    """Skips where tests cannot run as other users."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("tried", QUICK, ids=claim)
def test_a_stranger_gets_nowhere(tried: Way) -> None:
    with users() as two:
        tried(two)


@pytest.mark.soak
def test_a_stranger_gets_nowhere_by_any_way() -> None:
    for tried in WAYS:
        print(claim(tried))
        with users() as two:
            tried(two)
    tell(
        "who may",
        "tests as a second uid",
        f"{len(WAYS)} ways tried as a second user and as root, none led anywhere",
    )
