"""Accelerator runtimes, and transfers from their memory into the host's memory."""
