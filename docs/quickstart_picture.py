"""Draw quickstart.svg, the terminal session of the example on the first page.

Run it with `.venv/bin/python docs/quickstart_picture.py`. It runs the example twice, kills the
first one, and records what is printed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
EXAMPLE = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
FONT_FACE = re.compile(r"@font-face {.*?}\n", re.DOTALL)
TRAINED_SECS = 1.2
"""How long the first start trains until it is killed."""


def main() -> None:
    """Run the session, and write the picture beside this file."""
    (code,) = EXAMPLE.findall((HERE / "index.md").read_text())
    console = Console(record=True, width=64, file=open(os.devnull, "w"))  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HOLDFAST_RAM": f"{folder}/ram", "PYTHONUNBUFFERED": "1"}
        (Path(folder) / "train.py").write_text(code)

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

        def show(command: str, *printed: str) -> None:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            for line in printed:
                console.print(Text(line))

        first = start()
        assert first.stdout is not None
        begins = first.stdout.readline().rstrip()
        time.sleep(TRAINED_SECS)
        first.send_signal(signal.SIGKILL)
        first.wait()
        show("python train.py", begins, "Killed")
        second = start()
        printed, _ = second.communicate()
        show("python train.py", *printed.splitlines())
        holdfast = [sys.executable, "-m", "holdfast"]
        subprocess.run([*holdfast, "stop", "runs/first"], cwd=folder, env=environment, check=False)
        shutil.rmtree(f"{folder}/ram", ignore_errors=True)
    picture = console.export_svg(title="a run that is killed and started again")
    # The reader's own font: nothing is loaded from elsewhere.
    picture = FONT_FACE.sub("", picture).replace("Fira Code", "monospace")
    (HERE / "quickstart.svg").write_text(picture)


if __name__ == "__main__":
    main()
