"""PyTorch: its states, its arrays, and its processes."""
