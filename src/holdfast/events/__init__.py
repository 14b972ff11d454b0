"""What happens in a run, as typed records."""
