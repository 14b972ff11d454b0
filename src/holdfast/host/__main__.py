"""Run one agent: `python -m holdfast.host CONFIG`; trainers and `holdfast run` start it."""

import sys

from holdfast.local_agent.detached_process import Main, run_detached


def _load() -> Main:
    from holdfast.host.process import main

    return main


sys.exit(run_detached(_load, sys.argv[1]))
