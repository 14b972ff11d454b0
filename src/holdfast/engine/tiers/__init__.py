"""Runs with two durable tiers, and the copying of checkpoints between places."""
