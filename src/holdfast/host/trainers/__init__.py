"""The trainers of one agent: their starts and ends, and their saves."""
