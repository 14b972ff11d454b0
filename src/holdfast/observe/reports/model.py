"""Define the report of a run: what `holdfast report --json` prints.

Times are in UTC, durations in seconds. The categories of a run, of an attempt and of each slice of
the timeline are disjoint and add up to its wall time exactly, because they are counted in whole
microseconds.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

CATEGORIES = (
    "productive",
    "redone",
    "restart",
    "blocked",
    "inflation",
    "waiting",
    "compiling",
    "unknown",
)
"""In the order in which they are shown."""
RESTART_PARTS = ("down", "startup", "opening", "restore", "first_step")

Micros = dict[str, int]
"""Microseconds by category."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the run's time; pieces follow each other without gaps.

    Attributes:
        start_secs: Its begin, since the begin of the run.
        secs: Its length.
        attempt: The attempt.
        steps: The steps that were finished in it.
        categories: Its length by category, without zeros.
    """

    start_secs: float
    secs: float
    attempt: int
    steps: int
    categories: dict[str, float]


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    Attributes:
        attempt: Its number.
        host: The host whose trainer was timed: the one of the lowest rank.
        start_secs: Where its share of the run's time begins: the end of the attempt before.
        wall_secs: The length of that share.
        categories: That length by category.
        restart: The category `restart` by part.
        first_step: The first step that it finished; null: none.
        last_step: The last one.
        quiet_step_secs: The median duration of a step without a save; null: none was seen.
        end: How it ended: `closed`, `lost`, `host_lost`, `preempted`, `fenced`, `went_back`,
            `exception`, `unseen`, or `open` if it goes on as far as the events show.
        launchers: What has started its processes, the innermost first; empty: unknown, or by hand.
        restarts: How often these have started the job again, by their names.
    """

    attempt: int
    host: str
    start_secs: float
    wall_secs: float
    categories: dict[str, float]
    restart: dict[str, float]
    first_step: int | None
    last_step: int | None
    quiet_step_secs: float | None
    end: str
    launchers: tuple[str, ...] = ()
    restarts: dict[str, int] = {}


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An end of an attempt that cost time.

    Attributes:
        time: When it was noticed.
        at_secs: The same, since the begin of the run.
        attempt: The attempt that ended.
        cause: As `end` of the attempt.
        host: The host that was lost, or whose process was.
        last_step: The last step before it; null: none.
        steps_lost: The finished steps that were to be made again; null: the run did not continue.
        secs_to_next_step: The time until the next finished step; null: there was none.
        source: The tier of which most of the state was read; null: no state was read.
        sources: The bytes read, by tier.
    """

    time: datetime
    at_secs: float
    attempt: int
    cause: str
    host: str
    last_step: int | None
    steps_lost: int | None
    secs_to_next_step: float | None
    source: str | None
    sources: dict[str, int]


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An end of a command that `holdfast run` had started, and what it decided.

    Attributes:
        time: When it was recorded.
        host: The host of that `holdfast run`.
        attempt: The newest attempt then.
        cause: The class of the end, as in the event `command_ended`.
        code: The exit code; 128 + N if signal N ended it.
        reason: What is known of the cause.
        restarts: How often the command had been started again before.
        restart_in_secs: When it is started again; null: it is not.
        stopped_because: Why it is not, though failures are restarted; empty: they are not.
        stacks: The file of the run's events with the stacks of a hang; empty: none.
    """

    time: datetime
    host: str
    attempt: int
    cause: str
    code: int
    reason: str
    restarts: int
    restart_in_secs: float | None
    stopped_because: str
    stacks: str


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """The times from one checkpoint to the next in the same attempt.

    Attributes:
        count: How many there are.
        p50_secs: Their median; null: none.
        p95_secs: Their 95th percentile.
        max_secs: The longest one.
        values_secs: All of them, in the order of time; of many, evenly chosen ones.
    """

    count: int = 0
    p50_secs: float | None = None
    p95_secs: float | None = None
    max_secs: float | None = None
    values_secs: list[float] = []


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of one tier.

    Attributes:
        checkpoints: How many reached it.
        bytes: The bytes written to it; null: the events do not record them.
        reused_bytes: The bytes that earlier checkpoints had written.
        requests: The requests of the hosts' agents to it; null: the tier is no service.
        intervals: The times between checkpoints.
        cost_secs: By how much a checkpoint lengthened the steps: blocked time and inflation of one;
            null: not measured.
        secs: How long one took to reach the tier, the median; null: not recorded.
        at_secs: When they reached it, since the begin of the run; of many, evenly chosen ones.
    """

    checkpoints: int = 0
    bytes: int | None = None
    reused_bytes: int = 0
    requests: int | None = None
    intervals: Intervals = Intervals()
    cost_secs: float | None = None
    secs: float | None = None
    at_secs: list[float] = []


class SlowestRank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank whose parts took longest, by their median.

    Attributes:
        rank: Its number.
        host: Its host.
        part_secs: The median time from the call of `save` to the sealed part.
        of_all_secs: The same of all ranks.
    """

    rank: int
    host: str
    part_secs: float
    of_all_secs: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a run went.

    Attributes:
        run: The run.
        started: When the first process of the run began.
        wall_secs: The time from then to the last event of a trainer.
        categories: That time by category.
        restart: The category `restart` by part.
        goodput: The share of `productive`; null if there is no time.
        attempts: In their order.
        failures: In their order.
        ends: The ends that `holdfast run` has recorded, in their order.
        tiers: By name: `ram`, `peer` (in enough failure domains), `durable`,
            `remote`.
        slowest_rank: Null if no part was saved.
        waiting: The category `waiting` as reported, by reason.
        steps: The steps of the run that were finished, each counted once.
        timeline: The run's time in pieces.
        notes: What was left out, and why.
    """

    run: str
    started: datetime | None
    wall_secs: float
    categories: dict[str, float]
    restart: dict[str, float]
    goodput: float | None
    attempts: list[AttemptReport]
    failures: list[RunFailure]
    ends: list[CommandEnd] = []
    tiers: dict[str, TierReport]
    slowest_rank: SlowestRank | None
    waiting: dict[str, float]
    steps: int
    timeline: list[Slice]
    notes: list[str]


def in_secs(micros: Micros, names: tuple[str, ...] = CATEGORIES) -> dict[str, float]:
    """Return durations in seconds, with a zero for each name that is missing."""
    return {name: micros.get(name, 0) / 1e6 for name in names}
