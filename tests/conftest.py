"""What every test runs under."""

from hypothesis import settings

# A shared machine's pauses fail no test; a failure prints the blob that replays it.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")
