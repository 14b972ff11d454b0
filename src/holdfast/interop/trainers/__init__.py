"""Trainers of other projects that save with Holdfast: one module for each."""
