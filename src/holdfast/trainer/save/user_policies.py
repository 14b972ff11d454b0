"""Run the policies that a user wrote, on a background thread of rank 0's trainer.

A save policy is evaluated for each published step in turn; if it selects a step, the agent sets a
target step. A preservation policy is evaluated when the agent reports removable checkpoints.

The thread waits on a lock, which is released for each step and notice. Releasing it costs the
training thread about ten microseconds, at most 200 times a second; looking at it costs a tenth of
one. See docs/decisions/0046.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from holdfast.clock import Clock
from holdfast.engine.reading.metadata import metadata_of
from holdfast.engine.reading.view import View
from holdfast.errors import HoldfastError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.format.records import decode_metrics
from holdfast.host.wire import protocol
from holdfast.policy import (
    preservation_evaluation,
    save_evaluation,
)
from holdfast.policy.contexts import CheckpointInfo, PreservationContext, SaveContext
from holdfast.policy.preservation_evaluation import kept
from holdfast.policy.preservation_policy import AnyPreservationPolicy, PreservationPolicy
from holdfast.policy.save_decision_policy import AnySavePolicy, SaveDecisionPolicy
from holdfast.policy.save_evaluation import due
from holdfast.policy.vouching import Voucher
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.options import Options

PAUSE_SECS = 0.005
"""Steps shorter than this are evaluated together: waking the thread for each would slow them."""
LATE_SECS = 10.0
"""How long a policy may take before a warning names it."""
CATCH_UP_STEPS_MAX = 10_000
CLOSE_SECS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserPolicies:
    """The parts of the policies that a user wrote.

    Attributes:
        durable: When to save to the durable tier.
        ram: When to save to RAM.
        preservation: What the durable tier keeps.
        vouchers: What vouches for checkpoints, of which the agent keeps the newest in the remote
            tier; none if there is no such tier.
        history: The checkpoints of the timeline.
    """

    durable: SaveDecisionPolicy | None
    ram: SaveDecisionPolicy | None
    preservation: PreservationPolicy | None
    vouchers: tuple[Voucher, ...] = ()
    history: list[CheckpointInfo] = field(default_factory=list)

    @property
    def is_any(self) -> bool:
        """Whether there is any such policy."""
        return any(p is not None for p in (self.durable, self.ram, self.preservation))


def user_policies(options: Options, rank: int, load_view: Callable[[], View]) -> UserPolicies:
    """Return the parts of the policies that a user wrote; empty except on rank 0.

    Save policies get the history of the checkpoints that `load_view` lists.
    """
    if rank != 0:
        return UserPolicies(durable=None, ram=None, preservation=None)
    ram = options.ram.save_decision_policy if options.ram is not None else None
    policies = UserPolicies(
        durable=save_evaluation.split(options.save).by_user,
        ram=save_evaluation.split(ram).by_user if ram is not None else None,
        preservation=preservation_evaluation.split(options.keeping).by_user,
        vouchers=options.vouchers if options.remote is not None else (),
    )
    if policies.durable is not None or policies.ram is not None:
        policies.history.extend(_history(load_view()))
    return policies


def _history(view: View) -> list[CheckpointInfo]:
    """Return the checkpoints of the timeline, as policies see them."""
    records = [metadata_of(view.sources(checkpoint)) for checkpoint in view.sound()]
    return [CheckpointInfo(record.step, record.time, record.metrics) for record in records]


class UserPolicyThread:
    """Evaluate a user's policies on a thread of their own, so that they cannot block the training.

    Args:
        policies: The policies.
        session: The session with the agent.
        clock: The clock.
        published: Returns the newest published step.
        context: Returns (whether a save is in progress, whether the run is being preempted).
        on_error: Called with each error of a policy.
    """

    def __init__(
        self,
        policies: UserPolicies,
        session: AgentSession,
        clock: Clock,
        published: Callable[[], int],
        context: Callable[[], tuple[bool, bool]],
        on_error: Callable[[HoldfastError], None],
    ) -> None:
        self._policies = policies
        self._session = session
        self._clock = clock
        self._published = published
        self._context = context
        self._on_error = on_error
        self._asked = published()
        self._running: tuple[str, float] | None = None
        """The method of a policy that runs now, and since when. Written by the own thread."""
        self._warned: tuple[str, float] | None = None
        self._method = ""
        """The method of a policy that was called last, of whichever policies."""
        self._failures: set[str] = set()
        """The kinds of errors that were logged."""
        self._idle = threading.Lock()
        """Locked while there is nothing new; any thread releases it, the own one acquires it."""
        self._idle.acquire()
        self._lock = threading.Lock()
        self._to_judge: protocol.Notice | None = None
        self._unanswered: protocol.Notice | None = None
        self._has_committed = False
        """Whether a checkpoint was committed since what vouches for checkpoints was reported."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-policies", daemon=True)
        self._thread.start()

    def note_step(self) -> None:
        """Evaluate the step that was published; called on the training thread, at every step.

        A warning is logged once if a policy has not returned for `LATE_SECS`.
        """
        if self._idle.locked():
            self._wake()
        elif self._running is not None:
            self._warn_if_late()

    def _wake(self) -> None:
        # Another thread may have released it since.
        with contextlib.suppress(RuntimeError):
            self._idle.release()

    def _warn_if_late(self) -> None:
        running = self._running
        if running is None or running is self._warned:
            return
        secs = self._clock.monotonic() - running[1]
        if secs >= LATE_SECS:
            self._warned = running
            log.warning(
                "%s has not returned for %.0f s; until it does, the user's policies are not "
                "evaluated: none requests a save, and nothing that they may keep is deleted",
                running[0],
                secs,
            )

    def on_notice(self, notice: protocol.Notice) -> None:
        """Apply a notice of the agent; called on the watcher's thread."""
        with self._lock:
            self._has_committed |= notice.kind == "committed"
            if notice.kind == "judge":
                self._to_judge = notice
            elif notice.kind == "committed" and notice.data is not None:
                self._policies.history.append(_info(notice.data))
                self._policies.history.sort(key=lambda info: info.step)
        self._wake()

    def close(self) -> None:
        """End the thread, after it has evaluated the last notice.

        A policy that does not return within `CLOSE_SECS` is abandoned, with what it has not
        evaluated; its thread ends with the process.
        """
        self._closed.set()
        self._wake()
        self._thread.join(min(LATE_SECS, CLOSE_SECS))
        self._warn_if_late()
        self._thread.join(max(0.0, CLOSE_SECS - LATE_SECS))
        if self._thread.is_alive():
            running = self._running
            log.warning(
                "close: %s did not return within %.0f s, and is abandoned; what the user's "
                "policies would have decided since is not done",
                running[0] if running is not None else "the agent's answer to a user's policy",
                CLOSE_SECS,
            )

    def _run(self) -> None:
        while not self._closed.is_set():
            self._idle.acquire()
            self._act()
            self._closed.wait(PAUSE_SECS)
        self._act()

    @contextlib.contextmanager
    def _running_method(
        self, policy: SaveDecisionPolicy | PreservationPolicy, method: str
    ) -> Iterator[None]:
        members: Sequence[object] = (policy,)
        if isinstance(policy, AnySavePolicy | AnyPreservationPolicy):
            members = policy.policies
        names = " or ".join(f"{type(member).__name__}.{method}" for member in members)
        self._running, self._method = (names, self._clock.monotonic()), names
        try:
            yield
        finally:
            self._running = None

    def _report(self, error: HoldfastError) -> None:
        """Log an error, and have the trainer raise it."""
        self._log(error)
        self._on_error(error)

    def _log(self, error: HoldfastError) -> None:
        """Log an error unless one of its kind was logged: it may occur at every step."""
        cause = error.__cause__
        kind = (
            str(error) if cause is None else f"{str(error).partition(' raised ')[0]} {type(cause)}"
        )
        if kind not in self._failures:
            self._failures.add(kind)
            log.warning("%s", error, exc_info=cause)

    def _act(self) -> None:
        try:
            self._ask_to_save()
            self._report_vouched()
            self._judge()
        except HoldfastError as error:
            self._report(error)
        except BaseException as error:
            # The user's code runs here, so any exception is possible, `sys.exit` and a cancelled
            # task among them; the trainer raises it, and the thread continues.
            failure = HoldfastError(
                f"evaluate the user's policies: {self._method} raised {_text(error)}"
            )
            failure.__cause__ = error
            self._report(failure)
        if self._unanswered is not None:
            # If the policy fails, all checkpoints are kept. The agent is answered only after the
            # error is queued, so that a wait for preservation raises it.
            unanswered, self._unanswered = self._unanswered, None
            with contextlib.suppress(HoldfastError):
                self._answer(unanswered, (True,) * len(unanswered.data))

    def _ask_to_save(self) -> None:
        published = self._published()
        steps = range(max(self._asked + 1, published - CATCH_UP_STEPS_MAX), published + 1)
        self._asked = published
        for is_durable, policy in ((True, self._policies.durable), (False, self._policies.ram)):
            if policy is not None and any(self._is_due(policy, step) for step in steps):
                request = protocol.RequestSave(durable=is_durable, reason=type(policy).__name__)
                try:
                    self._session.call("request", request, protocol.Requested)
                except WaitTimeoutError as error:
                    # The agent keeps the wish: the ranks save once their hosts agree.
                    self._log(error)

    def _is_due(self, policy: SaveDecisionPolicy, step: int) -> bool:
        is_saving, is_preempted = self._context()
        context = SaveContext(
            now=self._clock.now(),
            is_saving_in_progress=is_saving,
            reached_preemption=is_preempted,
        )
        with self._lock:
            history = tuple(self._policies.history)
        with self._running_method(policy, "should_save"):
            return due(policy, step, history, context=context)

    def _report_vouched(self) -> None:
        """Report after a commit up to which step checkpoints are vouched for."""
        if self._policies.vouchers and self._has_committed:
            self._has_committed = False
            step = min(voucher.vouched for voucher in self._policies.vouchers)
            self._session.call("vouched", protocol.Vouched(step=step), protocol.Empty)

    def _judge(self) -> None:
        with self._lock:
            to_judge, self._to_judge = self._to_judge, None
        if to_judge is None or self._policies.preservation is None:
            return
        infos = [_info(entry) for entry in to_judge.data]
        context = PreservationContext(self._clock.now())
        self._unanswered = to_judge
        with self._running_method(self._policies.preservation, "should_preserve"):
            keep = kept(self._policies.preservation, infos, context=context)
        self._unanswered = None
        self._answer(to_judge, keep)

    def _answer(self, notice: protocol.Notice, keep: Sequence[bool]) -> None:
        assert notice.id is not None
        ids = tuple(
            msgspec.convert(entry["id"], CheckpointId)
            for entry, is_kept in zip(notice.data, keep, strict=True)
            if is_kept
        )
        self._session.call("judged", protocol.Judged(newest=notice.id, keep=ids), protocol.Empty)


def _text(error: BaseException) -> str:
    """Return class and text of an error, which may be unable to make its text."""
    return "".join(traceback.format_exception_only(error)).strip()


def _info(entry: Mapping[str, Any]) -> CheckpointInfo:
    time = datetime.fromisoformat(entry["time"])
    return CheckpointInfo(entry["id"][0], time, decode_metrics(entry["metrics"]))
