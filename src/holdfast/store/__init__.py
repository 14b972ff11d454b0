"""Places that keep bytes: one small contract, and what stands behind it."""
