"""Show the progress of the demo: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display(Protocol):
    """Shows the progress of the runs. One thread calls its methods."""

    def begin(self, name: str, steps: int) -> None:
        """Start a run; the previous one has ended."""
        ...

    def show_step(self, step: int, loss: float) -> None:
        """Show that a step is finished. After a failure, steps are repeated."""
        ...

    def show_line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def make_display(console: Console) -> Display:
    """Return the display that suits a console."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


@final
class LiveDisplay:
    """One bar for each run, redrawn in place; lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=8,
        )
        self._task = self._progress.add_task("", visible=False, loss="")

    def begin(self, name: str, steps: int) -> None:
        self._task = self._progress.add_task(name, total=steps, loss="-")

    def show_step(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step + 1, loss=f"{loss:.3f}")

    def show_line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


@final
class PlainDisplay:
    """A line for every eighth of a run, and the lines of `show_line`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._steps = 0

    def begin(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps

    def show_step(self, step: int, loss: float) -> None:
        done = step + 1
        if done == self._steps or done % max(1, self._steps // 8) == 0:
            self.show_line(f"{self._name}: step {done} of {self._steps}, loss {loss:.3f}")

    def show_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass
