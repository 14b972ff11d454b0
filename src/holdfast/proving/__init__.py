"""`holdfast prove`: run a program uninterrupted and with kills, and compare their saves."""
