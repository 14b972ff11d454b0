"""Conversion of frameworks' trees and arrays to specs and host buffers, and back.

Only this package imports `jax` and `torch`.
"""
