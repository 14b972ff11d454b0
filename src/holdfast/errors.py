"""The closed set of errors, named by what the caller should do about them.

Every error that leaves Holdfast is a `HoldfastError`. A new class stands here only where a caller
would react differently; the message says which operation failed, on what, what was expected, what
was found and what to do next. Errors of other libraries and of the operating system are translated
once, where they enter.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """The root of all errors that Holdfast raises."""


class InvalidArgumentError(HoldfastError, ValueError):
    """A call's argument is not what the call takes: mend the call. Nothing was changed."""


class UnsupportedLeafError(HoldfastError, TypeError):
    """A leaf of the state cannot be saved: take it out or convert it. Nothing was written."""


class StructureMismatchError(HoldfastError, ValueError):
    """The state asked for differs from what was saved: change one of the two."""


class StepNotFoundError(HoldfastError, LookupError):
    """No checkpoint of this step was ever saved on this timeline: choose another step."""


class StepUncommittedError(HoldfastError, LookupError):
    """A checkpoint of this step was begun and never committed: choose another step."""


class CheckpointDamagedError(HoldfastError):
    """Bytes of a committed checkpoint are wrong or gone: use another copy or another step."""


class StepExistsError(HoldfastError):
    """The step is saved already: save a later one, or overwrite it with `force=True`."""


class StepOrderError(HoldfastError, ValueError):
    """Steps went backwards: call `resume(state, step=...)` first, which starts a new branch."""


class NotARunError(HoldfastError):
    """The directory holds something that is not a Holdfast run: choose another directory."""


class NewerFormatError(HoldfastError):
    """The data was written by a newer Holdfast: upgrade this one."""


class StorageError(HoldfastError):
    """A store refused or failed an operation (full, not writable, I/O error): mend the storage."""


class OutOfSpaceError(StorageError):
    """A store has no room for the bytes: free some, or make the store larger."""


class ObjectNotFoundError(StorageError):
    """A store holds no object of this key."""


class DeviceError(HoldfastError):
    """A device refused or failed a copy into the host's memory: look at the device's own errors."""


class RunBusyError(HoldfastError):
    """Another live attempt works on the run: stop it, or open with `takeover=True`."""


class FencedError(HoldfastError):
    """A newer attempt took the run over: this process must stop; nothing more is saved."""


class ProcessLostError(HoldfastError):
    """Another process of the job failed, ended or never came: stop this one, start the job anew."""


class SaveFailedError(HoldfastError):
    """Background saves failed; training may go on, the next save is tried anew.

    Attributes:
        step: the first step whose checkpoint was not made.
        steps: all of them that were not reported before, ascending.
    """

    def __init__(self, step: int, message: str, steps: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.steps = steps or (step,)


class AgentUnavailableError(HoldfastError):
    """The host's agent cannot be started or reached: see its log, named in the message."""


class WaitTimeoutError(HoldfastError, TimeoutError):
    """What was waited for did not happen in the time given; it still goes on."""


def error_named(name: str, message: str) -> HoldfastError:
    """The error that another process raised; one of a class that is not known here is a plain one.

    `SaveFailedError` is a plain one too: it has a step besides its message.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)) or kind is SaveFailedError:
        return HoldfastError(message)
    return kind(message)
