"""Fork a process off the one that started it, which learns only whether it has its place.

The started process forks and exits as soon as the agent has its place. The agent is thereby no
child of the process that started it: that process need not wait for it, and cannot leave it a
zombie.
"""

import gc
import os
import sys
from collections.abc import Callable

ALREADY_RUNNING = 17
"""The exit code of an agent whose folder another agent has locked."""
Main = Callable[[str, Callable[[int], None]], int]
"""Takes the configuration and `on_placed`; returns the exit code."""


def run_detached(load_main: Callable[[], Main], argument: str) -> int:
    """Run an agent's main function in a fork, which ends with its exit code.

    Args:
        load_main: imports the function. It is called after the fork, since the parent only relays
            the exit code.
        argument: the configuration.

    Returns:
        In the parent: what the agent passed to `on_placed`, or 1 if it ended before.
    """
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        code = os.read(reading, 1)
        # The pipe is empty where the agent ended before it had its place.
        return code[0] if code else 1
    os.close(reading)

    # The modules stay; looking for garbage among them would cost a tenth of the start.
    gc.disable()
    main = load_main()
    gc.enable()

    def on_placed(code: int) -> None:
        os.write(writing, bytes([code]))
        os.close(writing)

    exit_code = main(argument, on_placed)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not by `sys.exit`, which waits for every thread: one may be in a request to a service that
    # does not answer.
    os._exit(exit_code)
