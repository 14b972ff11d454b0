"""Define the options that a user sets, and check them when they are set.

See docs/decisions/0049 and docs/decisions/0053.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import unicodedata
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol

from holdfast.coordination.messages import NAME_CHARS_MAX
from holdfast.environment import INTERFACE_VARIABLE, PROMETHEUS_VARIABLE
from holdfast.errors import InvalidArgumentError
from holdfast.host.wire.config import LINGER_SECS
from holdfast.host.wire.protocol import MetricsAddress, RemoteRequest, TierPolicies
from holdfast.peers.config import LOOPBACK, PeerConfig
from holdfast.peers.tls import PeerTls
from holdfast.policy import arguments as policy_arguments
from holdfast.policy import preservation_evaluation, save_evaluation
from holdfast.policy.loss_guard import LossGuard
from holdfast.policy.preservation_policy import LatestN, PreservationPolicy
from holdfast.policy.save_decision_policy import (
    ContinuousCheckpointingPolicy,
    SaveDecisionPolicy,
)
from holdfast.policy.vouching import VouchedStep, Voucher, preserving
from holdfast.store.location import RunLocation

PORT_MAX = 65535

NAME_SHOWN_MAX = 300
"""How many characters of an invalid name a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamTier:
    """The tier in the host's memory.

    Args:
        save_decision_policy: When to save to RAM in addition to each save for the durable tier.
            None saves to RAM only then.
        preservation_policy: Which complete checkpoints stay in memory. The newest one always stays.
            Built-in policies only. Default: `LatestN(1)`.
        copies: In the memory of how many failure domains each chunk is stored. A job on one host
            has one domain, and so one copy.
        limit_bytes: The most memory that all images on this host may use together. None allows as
            much as the tmpfs has.
        linger_secs: How long the agent holds the memory after the last trainer has ended, if one
            died. After a normal `close()` of all it leaves at once.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    save_decision_policy: SaveDecisionPolicy | None = None
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(1))
    copies: int = 2
    limit_bytes: int | None = None
    linger_secs: float = LINGER_SECS

    def __post_init__(self) -> None:
        if self.save_decision_policy is not None:
            save_evaluation.split(self.save_decision_policy)
        if preservation_evaluation.split(self.preservation_policy).by_user is not None:
            raise InvalidArgumentError(
                "RamTier(preservation_policy=...): expected a built-in policy, found "
                f"{type(self.preservation_policy).__name__}; the agent decides what stays in RAM, "
                "and it does not run user code"
            )
        for name, value, least in (
            ("copies", self.copies, 1),
            ("limit_bytes", self.limit_bytes, 0),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise InvalidArgumentError(
                    f"RamTier({name}=...): expected an int of at least {least}, found {value!r}"
                )
        if isinstance(self.linger_secs, bool) or not 0 <= self.linger_secs < float("inf"):
            raise InvalidArgumentError(
                f"RamTier(linger_secs=...): expected seconds, 0 or more, found {self.linger_secs!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNetwork:
    """This host's end of the network, at which its agent is reached, and what fails with the host.

    A job on one host uses `prometheus_port` alone. Each host may have other values.

    Args:
        interface: The address or network interface at which this host's agent serves other hosts.
            None selects the environment variable `HOLDFAST_INTERFACE`, else loopback.
        port: The port at that address; 0 selects a free one.
        tls: Mutual TLS between the agents. None authenticates agents by the run's token alone, and
            sends data unencrypted.
        prometheus_port: The port at that address where the agent serves metrics for Prometheus; 0
            selects a free one, which `holdfast status` shows. None selects the environment variable
            `HOLDFAST_PROMETHEUS_PORT`, else serves none. See docs/monitoring.md.
        failure_domain: A name for what fails together with this host, such as its rack. Hosts with
            the same name store no copies for each other. None selects the slice if the job has
            several, else the host.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    interface: str | None = None
    port: int = 0
    tls: PeerTls | None = None
    prometheus_port: int | None = None
    failure_domain: str | None = None

    def __post_init__(self) -> None:
        ports = {"port": self.port, "prometheus_port": self.prometheus_port}
        for name, port in ports.items():
            is_unset = port is None and name == "prometheus_port"
            if not is_unset and (type(port) is not int or not 0 <= port <= PORT_MAX):
                raise InvalidArgumentError(
                    f"HostNetwork({name}=...): expected a port of 0 to {PORT_MAX}, found {port!r}"
                )
        if self.tls is not None and not isinstance(self.tls, PeerTls):
            raise InvalidArgumentError(
                f"HostNetwork(tls=...): expected a PeerTls or None, found {self.tls!r}"
            )
        for name, text in (("interface", self.interface), ("failure_domain", self.failure_domain)):
            if text is not None:
                check_name(f"HostNetwork({name}=...)", text)

    @property
    def serving_address(self) -> str:
        """The address or interface at which this host's agent serves other hosts."""
        return self.interface or os.environ.get(INTERFACE_VARIABLE) or LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHooks:
    """What a manager does in its process beside its calls, with one switch for each.

    Args:
        preemption_signals: The signals that announce a preemption, whose handlers are installed in
            the main thread; () installs none. See `CheckpointManager.reached_preemption`. None
            selects SIGTERM, and under Slurm also SIGUSR1 and SIGUSR2 where the program does not
            handle them, because they would end the process. See docs/preemption.md.
        terminal_lines: Whether log lines and progress bars are shown in the terminal of a program
            that sets up no logging, as `HOLDFAST_LOG` chooses. False writes nothing to standard
            error, and leaves the logger `holdfast` to the program. The newest manager decides.
        fork_hooks: Whether a forked child releases at once what it inherits from the manager:
            handlers, locks, sockets and RAM. False runs nothing at a fork. A child then has to call
            exec or `os._exit`: until it ends, it may keep RAM and locks of the manager in use.
        keep_last: Whether the state of each `save` is kept by reference until the next one. If an
            exception ends the `with` block and that state is unchanged, its step is saved though
            none was due, so that no step is repeated. It costs the time of a walk through the state
            at each step, and is for states of JAX and PyTorch. See docs/guide.md.

    Raises:
        InvalidArgumentError: An argument has the wrong type, or a signal cannot be handled.
    """

    preemption_signals: Sequence[int] | None = None
    terminal_lines: bool = True
    fork_hooks: bool = True
    keep_last: bool = False

    def __post_init__(self) -> None:
        if self.preemption_signals is not None:
            signals = _checked_signals(self.preemption_signals)
            object.__setattr__(self, "preemption_signals", signals)
        for name in ("terminal_lines", "fork_hooks", "keep_last"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgumentError(
                    f"ProcessHooks({name}=...): expected True or False, found {value!r}"
                )


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """A second durable tier, slower and safer than the run's directory: most often a bucket.

    The agents copy checkpoints of the run's directory there, off the path of the training. The
    tier is an ordinary run, which can be read, checked and trained alone.

    Args:
        directory: The URL of a bucket and a prefix in it, or a path.
        save_decision_policy: Which of the checkpoints that are committed in the directory are
            copied. Built-in policies only, without a budget. Default: the newest one every ten
            minutes.
        preservation_policy: Which checkpoints the tier keeps. The newest one always stays.
            Built-in policies only. Default: `LatestN(3)`.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    save_decision_policy: SaveDecisionPolicy = field(
        default_factory=lambda: ContinuousCheckpointingPolicy(minimum_interval_secs=600.0)
    )
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(3))

    def __post_init__(self) -> None:
        try:
            location = RunLocation.parse(self.directory)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"RemoteTier(directory=...): {error}") from error
        object.__setattr__(self, "directory", location.text)
        if preservation_evaluation.split(self.preservation_policy).by_user is not None:
            raise InvalidArgumentError(
                "RemoteTier(preservation_policy=...): expected a built-in policy, found "
                f"{type(self.preservation_policy).__name__}; the agent decides what stays there, "
                "and it does not run user code"
            )
        if save_evaluation.split(self.save_decision_policy).by_user is not None:
            raise InvalidArgumentError(
                "RemoteTier(save_decision_policy=...): expected a built-in policy, found "
                f"{type(self.save_decision_policy).__name__}; the agent decides what is copied, "
                "and it does not run user code"
            )
        if save_evaluation.has_budget(self.save_decision_policy):
            raise InvalidArgumentError(
                "RemoteTier(save_decision_policy=...): expected a policy without max_overhead, "
                "because what a copy costs the training is not measured; give "
                "minimum_interval_secs"
            )


def remote_tier(given: object) -> RemoteTier | None:
    """Return the remote tier that a user has given as such, as a URL or path, or not at all.

    Raises:
        InvalidArgumentError: It is none of these.
    """
    if given is None or isinstance(given, RemoteTier):
        return given
    if isinstance(given, str | os.PathLike) and str(given):
        return RemoteTier(given)
    raise InvalidArgumentError(
        f"CheckpointManager(remote=...): expected a URL, a path or a RemoteTier, found {given!r}"
    )


OnSaveFailure = Literal["raise", "warn"]
"""What a save that fails in the background does to the training."""


def save_failure_mode(given: object) -> OnSaveFailure:
    """Return what a user has given for failed saves.

    Raises:
        InvalidArgumentError: It is neither of the two.
    """
    if given == "raise" or given == "warn":
        return given
    raise InvalidArgumentError(
        f"CheckpointManager(on_save_failure=...): expected 'raise' or 'warn', found {given!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCheck:
    """Compare what several ranks hold, such as the parameters of data-parallel replicas.

    At each save, every rank digests a share of what it holds of other ranks' parts, another one
    each time, and compares it with what they have saved. See docs/replicas.md.

    Args:
        share: The share that is compared at each save. All is compared within 1 / `share` saves.
        on_difference: `warn`: a difference is logged, and an event. `raise`: the next `save` on the
            rank that found it raises it too. `rewind`: all ranks learn of it at the same step, by
            `CheckpointManager.replicas_differ`, and go back with `CheckpointManager.rewind`.
        may_differ: Path prefixes of arrays that may differ between ranks.
        vote_steps: With `rewind`, the ranks meet at the steps that are its multiples, and learn
            what each has found.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    share: float = 0.05
    on_difference: Literal["warn", "raise", "rewind"] = "warn"
    may_differ: Sequence[str] = ()
    vote_steps: int = 100

    def __post_init__(self) -> None:
        policy_arguments.share("ReplicaCheck", "share", self.share)
        policy_arguments.positive_integer("ReplicaCheck", "vote_steps", self.vote_steps)
        if self.on_difference not in ("warn", "raise", "rewind"):
            raise InvalidArgumentError(
                "ReplicaCheck(on_difference=...): expected 'warn', 'raise' or 'rewind', found "
                f"{self.on_difference!r}"
            )
        if isinstance(self.may_differ, str) or not all(
            isinstance(prefix, str) for prefix in self.may_differ
        ):
            raise InvalidArgumentError(
                f"ReplicaCheck(may_differ=...): expected a list of path prefixes, found "
                f"{self.may_differ!r}"
            )


class SampleOrder(Protocol):
    """An order of samples that can go on at another step, as `holdfast.data.Order`."""

    def mark(self, step: int) -> Any:
        """Return what is used from `step` on."""
        ...

    def go_on_from(self, mark: Any, start: int) -> None:
        """Use from step `start` on what `mark` was used from, also if it was restored since."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All arguments of a manager except its directory."""

    save: SaveDecisionPolicy
    preservation: PreservationPolicy
    ram: RamTier | None
    network: HostNetwork = field(default_factory=HostNetwork)
    remote: RemoteTier | None = None
    takeover: bool
    process: ProcessHooks = field(default_factory=ProcessHooks)
    on_save_failure: OnSaveFailure = "raise"
    guard: LossGuard | None = None
    replicas: ReplicaCheck | None = None
    equal: VouchedStep = field(default_factory=VouchedStep)
    """The step up to which all replicas were equal; see `vote_steps`."""
    saves_each_due: bool = False
    """Whether a save that a policy asks for by its step waits for room; else it is skipped."""

    @property
    def vote_steps(self) -> int | None:
        """At which multiples the ranks vote on their replicas; None: they do not."""
        if self.replicas is None or self.replicas.on_difference != "rewind":
            return None
        return self.replicas.vote_steps

    @property
    def vouchers(self) -> tuple[Voucher, ...]:
        """What vouches for the checkpoints to which the training may go back."""
        guards = (self.guard,) if self.guard is not None else ()
        return (*guards, self.equal) if self.vote_steps is not None else guards

    @property
    def keeping(self) -> PreservationPolicy:
        """The preservation policy, with what it keeps for `rewind`."""
        return functools.reduce(preserving, self.vouchers, self.preservation)

    def check(self) -> None:
        """Check all that can be checked before anything of the run is touched.

        Raises:
            InvalidArgumentError: A policy, a port or a setting is invalid.
        """
        _ = self.durable_policies, self.step_policies, self.ram_policies, self.remote_request
        _ = self.metrics

    @property
    def durable_policies(self) -> TierPolicies:
        """The parts of the durable tier's policies that the agent evaluates."""
        keep = preservation_evaluation.split(self.keeping)
        return TierPolicies(
            save=_encoded_save(self.save),
            preserve=preservation_evaluation.encode(keep.by_agent).decode()
            if keep.by_agent
            else None,
            user_preserves=keep.by_user is not None,
        )

    @property
    def step_policies(self) -> str:
        """The parts of the policies that each rank evaluates alone, as text."""
        texts = [f"save_decision_policy={save_evaluation.text_by_step(self.save)}"]
        if self.ram is None:
            texts.append("ram=None")
        else:
            policy = save_evaluation.text_by_step(self.ram.save_decision_policy)
            texts.append(f"RamTier(save_decision_policy={policy}, copies={self.ram.copies})")
        return ", ".join(texts)

    def peer_config(self, token_file: str) -> PeerConfig:
        """Return where this host's agent serves the job's other hosts, also without a RAM tier."""
        network = self.network
        return PeerConfig(
            token_file=token_file,
            address=network.serving_address,
            port=network.port,
            tls=network.tls,
        )

    @property
    def metrics(self) -> MetricsAddress | None:
        """Where this host's agent is to serve metrics; None: nowhere.

        Raises:
            InvalidArgumentError: The port is none, or a package is missing.
        """
        port = self.network.prometheus_port
        setting = os.environ.get(PROMETHEUS_VARIABLE, "").strip()
        if port is None and setting:
            if not setting.isascii() or not setting.isdecimal() or int(setting) > PORT_MAX:
                raise InvalidArgumentError(
                    f"{PROMETHEUS_VARIABLE}: expected a port of 0 to {PORT_MAX}, found {setting!r}"
                )
            port = int(setting)
        if port is None:
            return None
        if importlib.util.find_spec("prometheus_client") is None:
            raise InvalidArgumentError(
                f"serve metrics at port {port}: the package prometheus_client is missing; install "
                "holdfast-checkpoint[prometheus]"
            )
        return MetricsAddress(address=self.network.serving_address, port=port)

    @property
    def remote_text(self) -> str | None:
        """The URL or the absolute path of the remote tier; None without the tier."""
        return str(self.remote.directory) if self.remote is not None else None

    @property
    def remote_request(self) -> RemoteRequest | None:
        """The remote tier as the agent gets it."""
        if self.remote is None:
            return None
        return RemoteRequest(
            place=str(self.remote.directory),
            save=save_evaluation.encode(self.remote.save_decision_policy).decode(),
            preserve=preservation_evaluation.encode(self.remote.preservation_policy).decode(),
            is_guarded=bool(self.vouchers),
        )

    @property
    def ram_policies(self) -> TierPolicies | None:
        """The parts of the RAM tier's policies that the agent evaluates; None without the tier."""
        if self.ram is None:
            return None
        policy = self.ram.save_decision_policy
        return TierPolicies(
            save=_encoded_save(policy) if policy is not None else None,
            preserve=preservation_evaluation.encode(self.ram.preservation_policy).decode(),
        )


def check_name(what: str, value: object) -> str:
    """Return the name of a host or of a failure domain if it is valid.

    Raises:
        InvalidArgumentError: It is not a string, is empty or too long, or has control characters.
    """
    is_name = isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX
    # Cc: control characters. Cs: surrogates, by which Python represents undecodable bytes.
    if not is_name or any(unicodedata.category(c) in ("Cc", "Cs") for c in str(value)):
        raise InvalidArgumentError(
            f"{what}: expected a name of 1 to {NAME_CHARS_MAX} characters, none of them a control "
            f"character, found {ascii(value)[:NAME_SHOWN_MAX]}"
        )
    return str(value)


def _encoded_save(policy: SaveDecisionPolicy) -> str | None:
    share = save_evaluation.split(policy).by_agent
    return save_evaluation.encode(share).decode() if share is not None else None


def _checked_signals(signals: Sequence[int]) -> tuple[signal.Signals, ...]:
    """Return the signals that announce a preemption.

    Raises:
        InvalidArgumentError: One of them is not a signal, or cannot be handled.
    """
    try:
        checked = tuple(signal.Signals(number) for number in signals)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"ProcessHooks(preemption_signals={signals!r}): expected signals, such as "
            f"(signal.SIGTERM,): {error}"
        ) from error
    if {signal.SIGKILL, signal.SIGSTOP} & set(checked):
        raise InvalidArgumentError(
            "ProcessHooks(preemption_signals=...): SIGKILL and SIGSTOP cannot be handled"
        )
    return checked
