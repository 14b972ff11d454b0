"""Sealed parts, from one store to another."""
