"""Which rank writes which bytes."""
