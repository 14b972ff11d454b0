"""Holdfast in other projects: one module for each, which imports that project.

The modules use the public calls of Holdfast and `engine.reading`, and nothing private.
"""
