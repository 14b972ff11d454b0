"""The leader of an attempt: what it knows of its hosts, and what it orders them to do."""
