"""Restore a state in a trainer process, agreed among the ranks."""
