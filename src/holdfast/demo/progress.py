"""Show the progress of the demo: a line for every eighth of a run, and what happens between."""

from __future__ import annotations

from rich.console import Console


class Display:
    """Shows the progress of the runs. Owned by the thread that drives them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._steps = "", 0

    def begin(self, name: str, steps: int) -> None:
        """Start a run; the previous one has ended."""
        self._name, self._steps = name, steps

    def show_step(self, step: int, loss: float) -> None:
        """Show that a step is finished. After a failure, steps are repeated."""
        done = step + 1
        if done == self._steps or done % max(1, self._steps // 8) == 0:
            self.show_line(f"{self._name}: step {done} of {self._steps}, loss {loss:.3f}")

    def show_line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
