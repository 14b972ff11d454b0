"""Record what happened in a run, and show it: events, reports, the live view, metrics."""
