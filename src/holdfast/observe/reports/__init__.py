"""Reports about runs: pure functions of their events."""
