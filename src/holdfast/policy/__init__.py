"""When to save and what to keep: pure functions of values, without I/O, clocks or threads."""
