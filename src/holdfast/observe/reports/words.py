"""Word what reports show, for people."""

from __future__ import annotations

CATEGORY_WORDS = {
    "productive": "productive",
    "redone": "steps made again",
    "restart": "starts and restarts",
    "blocked": "blocked by saves",
    "inflation": "slower steps during saves",
    "waiting": "waiting, as reported",
    "compiling": "compilation (JAX)",
    "unknown": "unknown",
}
RESTART_WORDS = {
    "down": "down",
    "startup": "process start",
    "opening": "opening the run",
    "restore": "restore",
    "first_step": "until the first step",
}
CAUSE_WORDS = {
    "lost": "process lost",
    "host_lost": "host lost",
    "preempted": "preemption",
    "fenced": "taken over",
    "exception": "exception",
    "went_back": "went back to an older step",
    "unseen": "ended without a trace",
    "closed": "closed before its last step was saved",
    "open": "running",
}
END_WORDS = {
    "preempted": "preempted",
    "stopped": "stopped by a signal",
    "lost": "another host lost",
    "killed": "killed",
    "memory": "out of memory",
    "nan": "not a number",
    "disk": "disk",
    "hang": "hang",
    "error": "error",
}
"""The causes of the event `command_ended`."""
TIER_WORDS = {"ram": "RAM", "peer": "other hosts' RAM", "durable": "durable", "remote": "remote"}


def duration_text(secs: float) -> str:
    """Return a readable duration with three digits or two units."""
    if secs < 1:
        return f"{secs * 1e3:.3g} ms"
    if secs < 60:
        return f"{secs:.3g} s"
    whole = round(secs)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {below}"
    return f"{whole // 60} min {whole % 60} s"


def tick_text(secs: float) -> str:
    """Return a round duration, such as that of an axis' tick, without a part that is zero."""
    return duration_text(secs).removesuffix(" 0 s").removesuffix(" 0 min").removesuffix(" 0 h")


def goodput_text(goodput: float) -> str:
    """Return a goodput in percent; a dash before the duration of any step is known."""
    return share_text(goodput) if goodput else "–"


def decision_text(restart_in_secs: float | None, stopped_because: str) -> str:
    """Return what followed an end of the command of `holdfast run`."""
    if restart_in_secs is None:
        return f"not restarted: {stopped_because}" if stopped_because else "not restarted"
    wait = f"after {duration_text(restart_in_secs)}" if restart_in_secs else "at once"
    return f"restarted {wait}"


def share_text(share: float) -> str:
    """Return a share in percent."""
    return f"{share:.1%}".replace("%", " %")
