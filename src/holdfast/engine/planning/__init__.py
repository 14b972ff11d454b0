"""Plans of which rank writes which bytes."""
