"""What a user sets, checked when it is set."""

from __future__ import annotations

import os
import signal
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.agent.config import LINGER_SECS
from holdfast.agent.protocol import TierPolicies
from holdfast.coordination.messages import NAME_CHARS_MAX
from holdfast.errors import InvalidArgumentError
from holdfast.peers.config import LOOPBACK
from holdfast.peers.tls import PeerTls
from holdfast.policy import preservation_policy, save_decision_policy
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.policy.save_decision_policy import SaveDecisionPolicy

INTERFACE_VARIABLE = "HOLDFAST_INTERFACE"

NAME_TOLD_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RamTier:
    """The tier in the host's memory.

    Args:
        save_decision_policy: when to save into RAM besides whenever the durable tier is due; None:
            exactly then.
        preservation_policy: which of the complete checkpoints keep their memory; the newest does
            always. Built-in policies only.
        copies: in the memory of how many failure domains each chunk should stand. With one host
            there is one domain, and one copy.
        limit_bytes: the most that all images together may take; None: as much as the tmpfs has.
        linger_secs: how long the agent keeps the memory after the last trainer has gone.
        failure_domain: what fails together with this host, such as a rack; hosts that give the
            same name hold no copies for each other. None: the slice where the job has several,
            else the host.
        interface: the address, or the network interface, at which this host's agent serves other
            hosts; None: the environment's `HOLDFAST_INTERFACE`, else loopback. A run on one host
            serves nothing.
        port: the port there; 0 takes a free one.
        tls: mutual TLS between the agents; None: they know each other by the run's token alone.

    Raises:
        InvalidArgumentError: an argument is out of its range, or a policy is none.
    """

    save_decision_policy: SaveDecisionPolicy | None = None
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(1))
    copies: int = 2
    limit_bytes: int | None = None
    linger_secs: float = LINGER_SECS
    failure_domain: str | None = None
    interface: str | None = None
    port: int = 0
    tls: PeerTls | None = None

    def __post_init__(self) -> None:
        if self.save_decision_policy is not None:
            save_decision_policy.split(self.save_decision_policy)
        if preservation_policy.split(self.preservation_policy).by_user is not None:
            raise InvalidArgumentError(
                "RamTier(preservation_policy=...): expected a built-in policy, found "
                f"{type(self.preservation_policy).__name__}; what RAM keeps must be decided at once"
            )
        for name, value, least in (
            ("copies", self.copies, 1),
            ("limit_bytes", self.limit_bytes, 0),
            ("port", self.port, 0),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise InvalidArgumentError(
                    f"RamTier({name}=...): expected an int of at least {least}, found {value!r}"
                )
        if isinstance(self.linger_secs, bool) or not 0 <= self.linger_secs < float("inf"):
            raise InvalidArgumentError(
                f"RamTier(linger_secs=...): expected seconds, 0 or more, found {self.linger_secs!r}"
            )
        if self.failure_domain is not None:
            check_name("RamTier(failure_domain=...)", self.failure_domain)
        if self.interface is not None:
            check_name("RamTier(interface=...)", self.interface)

    @property
    def serving_address(self) -> str:
        """Where this host's agent serves other hosts."""
        return self.interface or os.environ.get(INTERFACE_VARIABLE) or LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that a manager was given besides its directory."""

    save: SaveDecisionPolicy
    preservation: PreservationPolicy
    ram: RamTier | None
    takeover: bool
    preemption_signals: tuple[signal.Signals, ...]

    @property
    def durable_policies(self) -> TierPolicies:
        """The shares of the durable tier's policies that the agent evaluates."""
        keep = preservation_policy.split(self.preservation)
        return TierPolicies(
            save=_encoded_save(self.save),
            preserve=preservation_policy.encode(keep.by_agent).decode() if keep.by_agent else None,
            user_preserves=keep.by_user is not None,
        )

    @property
    def ram_policies(self) -> TierPolicies | None:
        """The same for the RAM tier, None where there is none."""
        if self.ram is None:
            return None
        policy = self.ram.save_decision_policy
        return TierPolicies(
            save=_encoded_save(policy) if policy is not None else None,
            preserve=preservation_policy.encode(self.ram.preservation_policy).decode(),
        )


def check_name(what: str, value: object) -> str:
    """The name of a host or of a failure domain.

    Raises:
        InvalidArgumentError: it is no text, empty, too long, or has control characters.
    """
    is_name = isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX
    # Cc: controls. Cs: half characters, which stand for bytes that are none.
    if not is_name or any(unicodedata.category(c) in ("Cc", "Cs") for c in str(value)):
        raise InvalidArgumentError(
            f"{what}: expected a name of 1 to {NAME_CHARS_MAX} characters, none of them a control "
            f"character, found {ascii(value)[:NAME_TOLD_MAX]}"
        )
    return str(value)


def _encoded_save(policy: SaveDecisionPolicy) -> str | None:
    share = save_decision_policy.split(policy).by_agent
    return save_decision_policy.encode(share).decode() if share is not None else None


def checked_signals(signals: Sequence[int]) -> tuple[signal.Signals, ...]:
    """The signals that announce a preemption.

    Raises:
        InvalidArgumentError: one of them is no signal, or cannot be handled.
    """
    try:
        found = tuple(signal.Signals(number) for number in signals)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"CheckpointManager(preemption_signals={signals!r}): expected signals, such as "
            f"(signal.SIGTERM,): {error}"
        ) from error
    if {signal.SIGKILL, signal.SIGSTOP} & set(found):
        raise InvalidArgumentError(
            "CheckpointManager(preemption_signals=...): SIGKILL and SIGSTOP cannot be handled"
        )
    return found
