"""`python -m holdfast.agent CONFIG`: one agent; trainers and `holdfast run` start it.

The process that was started ends as soon as the agent has its place, so that the agent is nobody's
child: whoever started it need not wait for it, and cannot leave it a zombie.
"""

import gc
import os
import sys


def _main(argument: str) -> int:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        said = os.read(reading, 1)
        # Nothing was said where the agent ended before it had its place.
        return said[0] if said else 1
    os.close(reading)

    # The modules stay; looking for garbage among them would cost a tenth of the start.
    gc.disable()
    from holdfast.agent.process import main

    gc.enable()

    def placed(code: int) -> None:
        os.write(writing, bytes([code]))
        os.close(writing)

    return main(argument, placed)


sys.exit(_main(sys.argv[1]))
