"""Show a run while it goes on: in a terminal, and as a page in a browser."""
