"""A training of one process. It prints whether its run was opened, or why not, as JSON.

Arguments: directory; `stay` for one that keeps the run open until it is killed; `takeover` for one
that takes it over.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import holdfast


def main() -> None:
    try:
        manager = holdfast.CheckpointManager(
            sys.argv[1], framework="numpy", takeover="takeover" in sys.argv
        )
    except holdfast.errors.HoldfastError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        return
    with manager:
        manager.save(0, {"w": np.zeros(3)}, force=True)
        print(json.dumps({"opened": True}), flush=True)
        if "stay" in sys.argv:
            time.sleep(600)


if __name__ == "__main__":
    main()
