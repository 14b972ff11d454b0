"""Reading a run: listing, verified reads, restore."""
