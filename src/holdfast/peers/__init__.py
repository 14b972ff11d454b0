"""Serve and read the RAM of a run's hosts over HTTP, and send messages between their agents."""
