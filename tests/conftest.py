"""What every test runs under."""

import os

from hypothesis import settings

# Eight devices on one processor, for the tests of shardings; to be said before JAX is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# A shared machine's pauses fail no test, and the same code is tried with the same examples.
settings.register_profile("holdfast", deadline=None, derandomize=True)
settings.load_profile("holdfast")
