"""Types are decoded from any thread, also for the first time."""

from __future__ import annotations

import subprocess
import sys

FIRST_DECODES = """
import sys, threading
from holdfast.format.json_codec import decode
from holdfast.format.records import PartRecord

# Threads take turns so often that they meet wherever they can.
sys.setswitchinterval(1e-6)
DATA = (
    b'{"run_id":"r","step":1,"attempt":[1,"00000001"],"rank":0,"part_count":1,"image_size_bytes":1,'
    b'"header_digest":"d","blocks":[],"reused":[],"values":[],"checkpoint":null}'
)
together = threading.Barrier(8)
found = []

def first() -> None:
    together.wait()
    found.append(decode(DATA, PartRecord).step)

threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [1] * 8, found
"""
TRIES = 12
"""Without the lock about every second process dies."""


def test_threads_that_decode_a_type_for_the_first_time_at_once_do_not_end_the_process() -> None:
    for _ in range(TRIES):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_DECODES], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
