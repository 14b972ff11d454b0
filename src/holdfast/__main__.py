"""Run the command line: `holdfast`, or `python -m holdfast`."""

import sys


def main() -> int:
    """Run one command and return the exit code; its modules take most of a second to import."""
    try:
        from holdfast.cli.main import main as run_command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
