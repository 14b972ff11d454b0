"""What the agent measures and serves as metrics."""
