"""Define the closed set of errors, one class for each reaction of the caller.

Invariants:
- Every error that leaves Holdfast is a `HoldfastError`.
- A class exists only where a caller reacts differently to it.
- A message names the operation that failed, its object, what was expected, what was found and what
  to do next.

Errors of other libraries and of the operating system are translated once, where they enter;
`translated` does so for files.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class HoldfastError(Exception):
    """The base class of all errors that Holdfast raises."""


class InvalidArgumentError(HoldfastError, ValueError):
    """An argument of a call is invalid: correct the call. Nothing was changed."""


class UnsupportedLeafError(HoldfastError, TypeError):
    """A leaf of the state cannot be saved: remove or convert it. Nothing was written."""


class StructureMismatchError(HoldfastError, ValueError):
    """The requested state's structure differs from the saved one: change the requested state."""


class StepNotFoundError(HoldfastError, LookupError):
    """No checkpoint of this step was saved on the current timeline: choose another step."""


class StepUncommittedError(HoldfastError, LookupError):
    """A checkpoint of this step was begun but never committed: choose another step."""


class CheckpointDamagedError(HoldfastError):
    """Bytes of a checkpoint are missing or corrupt: use another copy, or choose another step."""


class StepExistsError(HoldfastError):
    """The step is already saved: save a later one, or overwrite it with `force=True`."""


class StepOrderError(HoldfastError, ValueError):
    """The step is before the run's last one: call `resume(state, step=...)` to start a branch."""


class NotARunError(HoldfastError):
    """The directory is not a Holdfast run: choose another directory."""


class NewerFormatError(HoldfastError):
    """A newer version of Holdfast wrote the data: upgrade this one."""


class StorageError(HoldfastError):
    """A store operation failed (not writable, I/O error, unreachable): repair the storage."""


class OutOfSpaceError(StorageError):
    """A store has too little free space for the bytes: free space, or enlarge the store."""


class StorageRefusedError(StorageError):
    """A service refuses a request, for example because a permission is missing.

    Repeating the request does not help.
    """


class StorageThrottledError(StorageError):
    """A service refuses a request for now, because it gets too many: wait, and repeat it."""


class StorageUnreachableError(StorageError):
    """Nothing answers where a service is expected: start it, or correct the endpoint."""


class ObjectNotFoundError(StorageError):
    """A store has no object with this key."""


class DeviceError(HoldfastError):
    """A copy from a device into host memory failed: look at the errors the device reports."""


class RunBusyError(HoldfastError):
    """Another attempt is live on the run: stop it, or open the run with `takeover=True`."""


class FencedError(HoldfastError):
    """A newer attempt has taken over the run: stop this process. It saves nothing more."""


class ProcessLostError(HoldfastError):
    """Another process of the job failed, ended or never joined: restart the whole job."""


class SaveFailedError(HoldfastError):
    """Background saves failed: training may continue, and later saves are attempted as usual.

    Each failed save is reported by one error only. Checkpoints saved earlier are unaffected. A save
    that is "not confirmed" may still become durable: the agent did not answer.

    Attributes:
        step: The first step whose checkpoint was not made, or is not confirmed.
        steps: All steps whose failure this error is the first to report, ascending.
    """

    def __init__(self, step: int, message: str, steps: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.steps = steps or (step,)


class AgentUnavailableError(HoldfastError):
    """The host's agent cannot be started or reached: see its log, which the message names."""


class WaitTimeoutError(HoldfastError, TimeoutError):
    """The timeout passed before the awaited operation ended; the operation continues."""


class WaitInterruptedError(HoldfastError):
    """A signal ended a wait: leave the process. What the agents do for it continues."""


def error_named(name: str, message: str) -> HoldfastError:
    """Rebuild an error that another process raised, from the name of its class and its message.

    Returns:
        An error of the named class. A plain `HoldfastError` if the name is unknown here, and for
        `SaveFailedError`, which needs a step besides its message.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)) or kind is SaveFailedError:
        return HoldfastError(message)
    return kind(message)


@contextlib.contextmanager
def translated(action: str, path: str | Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the operation, the path and a remedy.

    Args:
        action: the operation, which the path follows in the message: `save to`.
        path: the object, or the URL that stands for it.

    Raises:
        ObjectNotFoundError: nothing is at the path.
        OutOfSpaceError: no space, or no quota, is left.
        StorageError: any other error of the operating system.
    """
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ObjectNotFoundError(f"{action} {path}: there is no such object") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                f"{action} {path}: no space left ({error.strerror}); free some, or keep fewer "
                "checkpoints"
            ) from error
        advice = _ADVICE.get(error.errno or 0, "check the storage")
        raise StorageError(
            f"{action} {path}: {error.strerror} (errno {error.errno}); {advice}"
        ) from error


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_ADVICE = dict.fromkeys(_DENIED, "check its permissions and mount") | {
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or use storage without one",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}
