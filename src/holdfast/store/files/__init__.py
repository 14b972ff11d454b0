"""What the stores need of an operating system: names, renames, locks, mounts, memory."""
