"""Show the progress of the demo: a live bar on a terminal, a line for every eighth elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """Shows the progress of the runs. One thread calls its methods, while `bars` is entered.

    Attributes:
        bars: One bar for each run, redrawn in place; lines scroll above them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.bars = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._name, self._steps = "", 0
        self._bar = self.bars.add_task("", visible=False, loss="")

    def begin(self, name: str, steps: int) -> None:
        """Start a run; the previous one has ended."""
        self._name, self._steps = name, steps
        self._bar = self.bars.add_task(name, total=steps, loss="-")

    def show_step(self, step: int, loss: float) -> None:
        """Show that a step is finished. After a failure, steps are repeated."""
        done = step + 1
        self.bars.update(self._bar, completed=done, loss=f"{loss:.3f}")
        is_eighth = done == self._steps or done % max(1, self._steps // 8) == 0
        if is_eighth and not self._console.is_terminal:
            self.show_line(f"{self._name}: step {done} of {self._steps}, loss {loss:.3f}")

    def show_line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
