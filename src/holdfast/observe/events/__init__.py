"""The events of a run: their schema, and one writer and one reader of their files."""
