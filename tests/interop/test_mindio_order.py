"""Saves, loads and failing saves of one path at the same time: the last one that succeeds stays.

The agent runs on a thread of this process. Each call to the file system below a try's folder may be
delayed, in the agent too, so that the saves and writes interleave at these calls. A seed determines
what each thread does and how long each of its calls is delayed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

from holdfast.clock import SystemClock  # noqa: E402
from holdfast.interop import mindio  # noqa: E402
from holdfast.interop.mindio import calls  # noqa: E402
from holdfast.interop.mindio.file_agent.service import FileService  # noqa: E402
from holdfast.local_agent.calls import serve_calls  # noqa: E402
from holdfast.local_agent.place import make_private  # noqa: E402

SEED = 20261127
DELAYED_SHARE = 0.5
DELAY_SECS_MAX = 0.002
SIZE = 2_000
EVENTS = {"open", "os.listdir", "os.rename", "os.remove", "fcntl.flock"}


class Delays:
    """Delays of the calls to the file system, from an audit hook, which stays."""

    def __init__(self) -> None:
        self.folder = ""
        self._chances: dict[int, random.Random] = {}
        self._seed = ""
        sys.addaudithook(self._hook)

    def begin(self, folder: Path, seed: str) -> None:
        """Delays the calls below `folder` from here on."""
        self._chances, self._seed, self.folder = {}, seed, str(folder)

    def end(self) -> None:
        """Delays nothing any more."""
        self.folder = ""

    def chance(self) -> random.Random:
        """The choices of the present thread."""
        number = threading.get_ident()
        if number not in self._chances:
            name = threading.current_thread().name
            self._chances[number] = random.Random(f"{self._seed} {name}")
        return self._chances[number]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or event not in EVENTS:
            return
        if event == "fcntl.flock" or str(arguments[0]).startswith(self.folder):
            chance = self.chance()
            if chance.random() < DELAYED_SHARE:
                time.sleep(chance.uniform(0, DELAY_SECS_MAX))


class AgentThread:
    """The file agent's service and its socket, on a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="agent")

    def start(self) -> None:
        """Returns once it answers."""
        self._thread.start()
        assert self._ready.wait(240)

    def end(self) -> None:
        """Returns once it has ended."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        service = FileService(self._folder, SystemClock())
        service.adopt_files()
        server = serve_calls(service.calls())
        await server.listen_in(self._folder)
        self._ready.set()
        await self._stopped.wait()
        await server.close(0.1)
        await service.settle_writes(10.0)
        service.close()


@pytest.fixture(scope="module")
def delays() -> Iterator[Delays]:
    made = Delays()
    yield made
    made.end()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOLDFAST_RAM", str(tmp_path / "ram"))
    monkeypatch.setenv("HOLDFAST_HOST", "host-a")
    calls._sessions.clear()
    folder = calls._session().agent.folder
    folder.parent.mkdir(parents=True)
    folder.parent.parent.chmod(0o700)
    make_private(folder)
    thread = AgentThread(folder)
    thread.start()
    yield
    calls._session().agent.close()
    calls._sessions.clear()
    thread.end()


@dataclass
class Call:
    """One call: `number` is what a save saved, or what a load found."""

    kind: str
    begun: float
    ended: float = 0.0
    number: int = -1
    code: int = 0


@dataclass
class Try:
    """Threads that save to one path and load from it, and what they got."""

    path: Path
    calls: list[Call] = field(default_factory=list)

    def save(self, number: int, way: str) -> None:
        call = Call("save", time.monotonic(), number=number)
        state = (number, torch.full((SIZE,), number))
        call.code = mindio.save(state, self.path, way)
        call.ended = time.monotonic()
        self.calls.append(call)

    def fail(self, way: str) -> None:
        """Saves what cannot be pickled."""
        assert mindio.save([torch.zeros(SIZE), lambda: 1], self.path, way) == -1

    def load(self, way: str) -> None:
        call = Call("load", time.monotonic())
        try:
            call.number = loaded(mindio.load(self.path, way))
        except FileNotFoundError:
            call.number = -1
        call.ended = time.monotonic()
        self.calls.append(call)

    def run(self, lists: list[list[Callable[[], None]]]) -> None:
        """Makes the calls of each list on a thread of its own."""

        def work(number: int, calls: list[Callable[[], None]]) -> None:
            threading.current_thread().name = f"saver {number}"
            for call in calls:
                call()

        with ThreadPoolExecutor(len(lists)) as pool:
            for done in [pool.submit(work, *one) for one in enumerate(lists)]:
                done.result()

    def check(self) -> None:
        """Every save succeeded, and what was found is never older than an acknowledged save."""
        saves = {call.number: call for call in self.calls if call.kind == "save"}
        assert all(call.code in (1, 2) for call in saves.values()), self.calls
        assert mindio.flush() == 0
        assert os.listdir(self.path.parent) == [self.path.name]
        self.calls.append(
            Call("end", time.monotonic(), number=loaded(torch.load(self.path, weights_only=False)))
        )
        for found in (call for call in self.calls if call.kind != "save"):
            before = [save for save in saves.values() if save.ended < found.begun]
            if found.number < 0:
                assert not before, f"{found} found nothing after {before}"
                continue
            own = saves[found.number]
            missed = [save for save in before if own.ended < save.begun]
            assert not missed, f"{found} found {own}; {missed} were saved after it"


def loaded(state: tuple[int, Any]) -> int:
    """The number of a state, which is whole."""
    number, weight = state
    assert bool((weight == number).all())
    assert len(weight) == SIZE
    return number


def at_once(made: Try, chance: random.Random) -> list[list[Callable[[], None]]]:
    """Eight saves, each on a thread."""
    ways = ["memfs"] * 6 + ["fopen"] * 2
    chance.shuffle(ways)
    return [[functools.partial(made.save, number, way)] for number, way in enumerate(ways)]


def in_turn(made: Try, chance: random.Random) -> list[list[Callable[[], None]]]:
    """Four threads that save, fail and load, two or three times each."""
    numbers = iter(range(100))
    lists = []
    for _ in range(4):
        calls: list[Callable[[], None]] = []
        for kind in chance.choices(["save", "fail", "load"], [4, 1, 2], k=chance.randint(2, 3)):
            way = chance.choice(["memfs", "memfs", "fopen"])
            if kind == "save":
                calls.append(functools.partial(made.save, next(numbers), way))
            else:
                calls.append(functools.partial(getattr(made, kind), way))
        lists.append(calls)
    lists[0].append(functools.partial(made.save, next(numbers), "memfs"))
    return lists


@pytest.mark.parametrize(
    "count", [30, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("plan", [at_once, in_turn])
@pytest.mark.usefixtures("agent")
def test_of_saves_to_one_path_the_last_one_that_succeeds_is_there(
    plan: Callable[[Try, random.Random], list[list[Callable[[], None]]]],
    count: int,
    delays: Delays,
    tmp_path: Path,
) -> None:
    for number in range(count):
        seed = f"{SEED} {plan.__name__} {number}"
        print("seed", seed)
        folder = tmp_path / str(number)
        folder.mkdir()
        made = Try(folder / "a")
        delays.begin(folder, seed)
        try:
            made.run(plan(made, random.Random(seed)))
            made.check()
        finally:
            delays.end()
