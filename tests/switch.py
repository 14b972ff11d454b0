"""A network switch in this process: frames between TAP devices are lost, late, repeated, reordered.

The kernel's own emulator (netem) is not everywhere, TAP devices are. One thread forwards the frames
of all ports; what happens to a frame is drawn from a seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_MAX_BYTES = 65_536
MAC_BYTES = 6
IDLE_SECS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to frames: the share that is lost or repeated, and how late each one is.

    A frame is late by `delay_secs` and a random time up to `jitter_secs`, which reorders frames.
    """

    loss: float = 0.0
    repeat: float = 0.0
    delay_secs: float = 0.0
    jitter_secs: float = 0.0


FAIR = Weather()


@dataclass
class Counts:
    """The frames that were taken, and what became of them."""

    taken: int = 0
    lost: int = 0
    repeated: int = 0


@dataclass
class Switch:
    """The ports and the weather; `weather` and `is_cut` may be changed at any time.

    Attributes:
        is_cut: the ports that reach nobody.
    """

    seed: int
    weather: Weather = FAIR
    is_cut: set[int] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._ports: list[int] = []
        self._port_of: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._is_over = threading.Event()

    def add_port(self, device: str) -> None:
        """Makes a TAP device of that name, the port of the next host."""
        port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self._ports.append(port)
        request = struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI)
        fcntl.ioctl(port, TUNSETIFF, request)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Forwards frames within; closes the ports on leaving."""
        thread = threading.Thread(target=self._run, name="switch")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            for port in self._ports:
                os.close(port)

    def _run(self) -> None:
        poller = select.epoll()
        for number, port in enumerate(self._ports):
            poller.register(port, select.EPOLLIN)
            assert self._ports[number] == port
        while not self._is_over.is_set():
            wait_secs = IDLE_SECS
            if self._late:
                wait_secs = min(wait_secs, max(0.0, self._late[0][0] - time.monotonic()))
            for file, _ in poller.poll(wait_secs):
                self._take(self._ports.index(file))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._late)
                self._put(target, frame)
        poller.close()

    def _take(self, source: int) -> None:
        while True:
            try:
                frame = os.read(self._ports[source], FRAME_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The device is down: its host is being removed.
                return
            self._port_of[frame[MAC_BYTES : 2 * MAC_BYTES]] = source
            target = self._port_of.get(frame[:MAC_BYTES])
            targets = range(len(self._ports)) if target is None else (target,)
            for one in targets:
                if one != source:
                    self._forward(source, one, frame)

    def _forward(self, source: int, target: int, frame: bytes) -> None:
        weather, chance = self.weather, self._chance
        self.counts.taken += 1
        if self.is_cut & {source, target} or chance.random() < weather.loss:
            self.counts.lost += 1
            return
        count = 2 if chance.random() < weather.repeat else 1
        self.counts.repeated += count - 1
        for _ in range(count):
            late_secs = weather.delay_secs + chance.random() * weather.jitter_secs
            if not late_secs:
                self._put(target, frame)
                continue
            self._number += 1
            at_secs = time.monotonic() + late_secs
            heapq.heappush(self._late, (at_secs, self._number, target, frame))

    def _put(self, target: int, frame: bytes) -> None:
        # A full or removed device loses the frame, as a cable would.
        with contextlib.suppress(OSError):
            os.write(self._ports[target], frame)
