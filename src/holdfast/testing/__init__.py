"""Test support for authors of stores; needs pytest, and the library does not import it.

See docs/decisions/0050.
"""

import pytest

# Makes failed assertions of the suite show their values.
pytest.register_assert_rewrite("holdfast.testing.store_bytes", "holdfast.testing.store_suite")
