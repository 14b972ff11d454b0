"""Run one agent: `python -m holdfast.agent CONFIG`; trainers and `holdfast run` start it.

The started process forks and exits as soon as the agent has its place. The agent is thereby no
child of the process that started it: that process need not wait for it, and cannot leave it a
zombie.
"""

import gc
import os
import sys


def _main(argument: str) -> int:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        code = os.read(reading, 1)
        # The pipe is empty where the agent ended before it had its place.
        return code[0] if code else 1
    os.close(reading)

    # The modules stay; looking for garbage among them would cost a tenth of the start.
    gc.disable()
    # Imported after the fork: the parent only relays the exit code.
    from holdfast.agent.process import main

    gc.enable()

    def on_placed(code: int) -> None:
        os.write(writing, bytes([code]))
        os.close(writing)

    return main(argument, on_placed)


sys.exit(_main(sys.argv[1]))
