"""Measure a run on one host, and format the measures for a monitoring service."""
