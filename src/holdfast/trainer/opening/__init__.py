"""Open a run in a trainer process: its place, its attempt and the agent."""
