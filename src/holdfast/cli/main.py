"""Run the command `holdfast`: dispatch to its subcommands, and turn errors into exit codes.

Exit codes: 0 for success; 1 for an error, which is printed in one line, with `--json` as a document
too, if `verify` found bad bytes, and if what `diff` or `prove` compares differs; 2 for wrong usage,
and if `diff` or `prove` cannot compare; 130 if interrupted. `run` exits with its command's code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from holdfast import __version__, environment
from holdfast.cli.advise import advise
from holdfast.cli.bisect import bisect
from holdfast.cli.clean import clean
from holdfast.cli.copy import copy
from holdfast.cli.demo import demo
from holdfast.cli.diff import diff
from holdfast.cli.doctor import doctor
from holdfast.cli.events import events
from holdfast.cli.files import export, import_files
from holdfast.cli.interruption import INTERRUPTED
from holdfast.cli.ls import ls
from holdfast.cli.output import print_error, print_json, showing_log
from holdfast.cli.page import page
from holdfast.cli.prove import prove
from holdfast.cli.report import report
from holdfast.cli.rm import rm
from holdfast.cli.run import run
from holdfast.cli.save import save
from holdfast.cli.show import show
from holdfast.cli.stats import stats
from holdfast.cli.status import status
from holdfast.cli.stop import stop
from holdfast.cli.streams import OF_OUTPUT, discard_rest, prepare
from holdfast.cli.uploads import uploads
from holdfast.cli.verify import verify
from holdfast.cli.watch import watch
from holdfast.errors import HoldfastError


class _InOrder(click.Group):
    """A group whose help lists the commands in the order in which they are added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
def commands() -> None:
    """Checkpoint training runs continuously, off the training thread."""
    environment.warn_unknown()


_COMMANDS = (ls, show, diff, verify, events, report, advise, save, copy, rm, export, import_files)
for _command in (
    *_COMMANDS,
    status,
    watch,
    page,
    stats,
    stop,
    clean,
    uploads,
    doctor,
    run,
    prove,
    bisect,
    demo,
):
    commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        prepare()
        with showing_log():
            code = commands.main(arguments, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except HoldfastError as error:
        print_error(str(error))
        # Of these the arguments are the command's own.
        command_line = list(sys.argv[1:] if arguments is None else arguments)
        if "--json" in command_line and command_line[0] not in (run.name, prove.name):
            print_json({"error": type(error).__name__, "message": str(error)})
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in OF_OUTPUT:
            raise
        discard_rest()
        # The reader of a pipe has gone: it has what it wanted.
        if not isinstance(error, BrokenPipeError):
            print_error(f"write the output: {os.strerror(error.errno or 0)}")
        return 1
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code if isinstance(code, int) else 0
