"""Write the events of a run."""
