"""Exchange messages between a process of `holdfast run --nproc` and its launcher, and show its end.

The launcher gives each process one end of a socket, whose descriptor is in `HOLDFAST_MEMBER`. A
message is one line of JSON. The launcher alone decides who is a rank of which generation; a process
reports what has become of its generation and waits for the next order.

See docs/decisions/0064.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from types import TracebackType

import msgspec

from holdfast import launchers
from holdfast.environment import MEMBER_VARIABLE
from holdfast.errors import InvalidArgumentError, ProcessLostError

TEXT_CHARS_MAX = 500
LINE_BYTES_MAX = 1 << 20

log = logging.getLogger(__name__)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process waits to become a rank."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The training has raised an exception that does not follow from another process's end.

    The process asks whether ranks were lost nevertheless; it has not left its generation.
    """

    generation: int
    text: str


class Left(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The process has left its generation, in which ranks were lost, and waits for the next one.

    Attributes:
        generation: The generation.
        last_step: The last step that it has passed to `save`; None: none.
        text: The exception that has ended the training.
        kept_step: The step whose state it still holds, unchanged; None: none.
    """

    generation: int
    last_step: int | None
    text: str
    kept_step: int | None = None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The process's training has returned in this generation; it is still a member of its group."""

    generation: int


class Assigned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The process is a rank of a generation.

    Attributes:
        generation: The number of the generation, counted from 1.
        rank: Its rank.
        world_size: The number of ranks.
        seat: Its place on this host, which it keeps; a device has the same number.
        store: The address of the generation's store, as `host:port`.
        pids: The processes of this host, of which some are the other ranks.
        peers: The addresses of the other hosts.
        lost: The ranks of the generation before that were lost since.
        kept_step: Save the state of this step, which the survivors still hold, and leave the
            generation; None: train.
        survivors: With `kept_step`, the rank that each rank of this generation had.
    """

    generation: int
    rank: int
    world_size: int
    seat: int
    store: str
    pids: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    kept_step: int | None = None
    survivors: tuple[int, ...] = ()


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Ranks of this generation were lost: leave it."""

    generation: int


class Reraise(msgspec.Struct, frozen=True, tag=True):
    """No rank was lost: the failure that was reported is the program's own."""


class Released(msgspec.Struct, frozen=True, tag=True):
    """The training has finished on all ranks, or the job was told to end before."""

    has_finished: bool


Report = Ready | Failed | Left | Finished
Order = Assigned | Broken | Reraise | Released


class Lines:
    """One end of a socket: whole messages, sent and received.

    Args:
        connection: The socket. Sending blocks, for a few bytes; receiving does not.
        kinds: The types of the messages that this end receives.
    """

    def __init__(self, connection: socket.socket, kinds: object) -> None:
        self.connection = connection
        self._decoder = msgspec.json.Decoder(kinds)
        self._received = b""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. The other end may have gone: then it is lost."""
        with contextlib.suppress(OSError):
            self.connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> Iterator[object]:
        """Read what has arrived, and yield the messages.

        Raises:
            EOFError: The other end is closed.
        """
        try:
            piece = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(error.strerror) from error
        if not piece:
            raise EOFError("closed")
        *lines, self._received = (self._received + piece).split(b"\n")
        if len(self._received) > LINE_BYTES_MAX:
            raise EOFError(f"a line of more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            yield self._decoder.decode(line)


class RankLink:
    """The end of a process that trains. Its main thread calls it; a thread of its own reads.

    Args:
        connection: The socket to the launcher.
        on_broken: Called on the reading thread when a generation is over.
    """

    def __init__(self, connection: socket.socket, on_broken: Callable[[Broken], None]) -> None:
        self._lines = Lines(connection, Order)
        self._on_broken = on_broken
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, name="holdfast-ranks", daemon=True)
        reader.start()

    @classmethod
    def from_environment(
        cls, environment: MutableMapping[str, str], on_broken: Callable[[Broken], None]
    ) -> RankLink:
        """Return the link of this process, and remove its variable: children have no such link.

        Raises:
            InvalidArgumentError: The process was not started by `holdfast run --nproc`.
        """
        text = environment.get(MEMBER_VARIABLE)
        if text is None:
            torchrun = launchers.TORCHRUN in launchers.launch_of(environment, sys.modules).names
            found = "one of torchrun, which ends all of them when one fails" if torchrun else "none"
            raise InvalidArgumentError(
                f"surviving: expected a process of `holdfast run --nproc N`, found {found} (no "
                f"{MEMBER_VARIABLE} in the environment); start the program with `holdfast run "
                "--nproc N --spares 1 -- python train.py`, and call surviving once"
            )
        try:
            connection = socket.socket(fileno=int(text))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"surviving: {MEMBER_VARIABLE} is {text!r}, no open socket of this process "
                f"({error}); call surviving in the process that `holdfast run` has started"
            ) from error
        os.set_inheritable(connection.fileno(), False)
        del environment[MEMBER_VARIABLE]
        return cls(connection, on_broken)

    def report(self, message: Report) -> None:
        """Send a report."""
        self._lines.send(message)

    def poll(self, secs: float) -> Order | None:
        """Return the next order; None if there is none within `secs` seconds.

        Raises:
            ProcessLostError: The launcher has ended.
        """
        try:
            order = self._orders.get(timeout=secs)
        except queue.Empty:
            return None
        if order is None:
            raise ProcessLostError(
                "surviving: `holdfast run`, which divides the ranks, has ended; start the training "
                "again"
            )
        return order

    def _read(self) -> None:
        """Read orders until the launcher ends."""
        try:
            while True:
                select.select([self._lines.connection], [], [])
                for order in self._lines.receive():
                    if isinstance(order, Broken):
                        self._on_broken(order)
                    self._orders.put(order)  # type: ignore[arg-type]
        except EOFError:
            self._lines.connection.close()
            self._orders.put(None)


def show_interruption_briefly(role: Callable[[], str]) -> None:
    """Show a Ctrl-C that ends the program as one line: each process of the job receives it."""
    earlier = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            # In one piece: other processes write too.
            sys.stderr.write(f"holdfast: {role()}: interrupted\n")
            sys.stderr.flush()
        else:
            earlier(kind, error, trace)

    sys.excepthook = show
