"""Run a training command and bring it back: its attempts, their ends, and the wait for its saves.

`holdfast run` is the command line of this package. It schedules nothing: it starts the command on
its own host, restarts it there, and ends with an exit code that a scheduler can act on.
"""
