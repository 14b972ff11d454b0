"""Holdfast in other projects: a room for each, which imports that project."""
