"""What a run holds: listing, verified reads, restore."""
