"""How the hosts of a run agree: a state machine without I/O, and what goes in and out of it."""
