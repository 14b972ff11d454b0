"""Holdfast beside its peer and beside the machine's limits; `python -m benchmarks` runs it all.

Every measurement is a process of its own (`benchmarks.worker`), the systems take turns within each
round, and what is told is the median over rounds, as ratios.
"""
