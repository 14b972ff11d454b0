"""Run the command line: `python -m holdfast`."""

import sys

from holdfast.cli.main import main

sys.exit(main())
