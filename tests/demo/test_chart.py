from pathlib import Path

from matplotlib.image import imread

from holdfast.demo.chart import draw
from holdfast.demo.report import make_report
from tests.demo.made_up import (
    interrupted_run,
    run_that_loses_a_host,
    uninterrupted_run,
    uninterrupted_run_of_two_hosts,
)


def test_the_chart_is_a_png_with_both_runs_and_the_failures(tmp_path: Path) -> None:
    one, other = interrupted_run(), uninterrupted_run()
    path = tmp_path / "losses.png"
    draw(make_report(0, one, other, []), one, other, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)
    assert pixels.shape[:2] == (900, 1200)
    colours = {tuple(colour) for colour in (pixels[..., :3] * 255).round().reshape(-1, 3).tolist()}
    for hexadecimal in ("9ecae9", "1b3a5c", "d55e00", "009e73", "8e4585"):
        assert tuple(float(byte) for byte in bytes.fromhex(hexadecimal)) in colours


def test_a_run_without_failures_can_be_drawn(tmp_path: Path) -> None:
    run = uninterrupted_run()
    draw(make_report(0, run, run, []), run, run, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000


def test_a_run_that_loses_a_host_can_be_drawn(tmp_path: Path) -> None:
    one, other = run_that_loses_a_host(), uninterrupted_run_of_two_hosts()
    path = tmp_path / "losses.png"
    draw(make_report(0, one, other, []), one, other, path)
    pixels = imread(path)
    colours = {tuple(colour) for colour in (pixels[..., :3] * 255).round().reshape(-1, 3).tolist()}
    assert tuple(float(byte) for byte in bytes.fromhex("d55e00")) in colours
