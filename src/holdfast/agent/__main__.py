"""`python -m holdfast.agent CONFIG`: one agent; trainers and `holdfast run` start it."""

import sys

from holdfast.agent.process import main

sys.exit(main(sys.argv[1]))
