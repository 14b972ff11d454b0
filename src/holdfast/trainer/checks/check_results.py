"""Define the results of the checks that `holdfast doctor` makes before a training."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """How much a result matters for a training."""

    OK = "ok"
    NOTE = "note"
    """It works; something is worth knowing."""
    WARNING = "warning"
    """It works, but slower, or with less protection."""
    PROBLEM = "problem"
    """A training would fail."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: what was looked at, what was found, and what to do about it."""

    severity: Severity
    subject: str
    found: str
    advice: str = ""


def passed(subject: str, found: str) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult(Severity.OK, subject, found)


def noted(subject: str, found: str, advice: str = "") -> CheckResult:
    """Return something worth knowing."""
    return CheckResult(Severity.NOTE, subject, found, advice)


def warned(subject: str, found: str, advice: str) -> CheckResult:
    """Return a result that costs time or protection."""
    return CheckResult(Severity.WARNING, subject, found, advice)


def failed(subject: str, found: str, advice: str = "") -> CheckResult:
    """Return a result with which a training would fail."""
    return CheckResult(Severity.PROBLEM, subject, found, advice)
