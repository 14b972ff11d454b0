"""Open a run in a trainer process: its place, its attempt, the other ranks and the agent."""
