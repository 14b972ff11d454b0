"""The RAM of a run's other hosts, over HTTP."""
