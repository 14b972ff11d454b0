"""JAX: trees, arrays, devices and processes."""
