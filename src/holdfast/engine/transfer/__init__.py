"""Transfer of sealed parts from one store to another."""
