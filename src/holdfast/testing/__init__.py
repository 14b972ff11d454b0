"""What others may test their own parts with; needs pytest, and is imported by nothing else here."""

import pytest

# So that a failed assertion of the suite tells its values.
pytest.register_assert_rewrite("holdfast.testing.store_bytes", "holdfast.testing.store_suite")
