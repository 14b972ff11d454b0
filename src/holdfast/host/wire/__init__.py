"""What other processes share with an agent: messages, files and cells, and its start."""
