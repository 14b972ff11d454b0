"""Run the file agent: `python -m holdfast.interop.mindio.file_agent CONFIG`; trainers start it."""

import sys

from holdfast.local_agent.detached_process import Main, run_detached


def _load() -> Main:
    from holdfast.interop.mindio.file_agent.process import main

    return main


sys.exit(run_detached(_load, sys.argv[1]))
