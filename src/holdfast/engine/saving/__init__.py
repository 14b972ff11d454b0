"""Saving one part of a checkpoint, from bytes to the sealed record."""
