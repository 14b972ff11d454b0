"""Handle what belongs to the trainer's process: forks, signals, the terminal."""
