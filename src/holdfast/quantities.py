"""Word counts, sizes and durations for people."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """Return a readable size, in powers of 1000."""
    size, units = float(size_bytes), ["kB", "MB", "GB", "TB", "PB"]
    if size < 1000:
        return f"{size_bytes} B"
    unit = "B"
    while size >= 999.95 and units:
        size, unit = size / 1000, units.pop(0)
    return f"{size:.1f} {unit}"


def secs_text(secs: float) -> str:
    """Return a readable duration, in one suitable unit."""
    secs = max(0.0, secs)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return `1 file` or `2 files`; `plural` is for nouns whose plural is not formed with an s."""
    return f"1 {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"
