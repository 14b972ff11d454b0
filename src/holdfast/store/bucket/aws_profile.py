"""Credentials of S3 that obstore does not find: profiles, SSO and processes of `~/.aws`.

The package boto3 reads them, through obstore's own provider. It is loaded only where a profile is
configured and the environment has no credentials that obstore finds by itself.

The files are read again every minute, so credentials that another program renews there are used by
a run that is under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidArgumentError

PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
PROFILE_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
OTHER_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of credentials that obstore finds by itself; they come before profiles."""
LIFETIME = timedelta(minutes=6)
"""How long credentials count as valid. obstore asks again five minutes before the end."""
EXTRA = "holdfast-checkpoint[aws]"


class ProfileCredentials:
    """A credential provider of obstore. Each call reads the profile anew."""

    def __init__(self, where: str) -> None:
        """Load boto3; `where` begins an error's message.

        Raises:
            ImportError: it is not installed.
            InvalidArgumentError: the profile is not there, or not valid.
        """
        from boto3 import Session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider

        self._session: Callable[[], Any] = Session
        self._provider: Callable[..., Any] = Boto3CredentialProvider
        self.config = {}
        try:
            region = self._session().region_name
        except BotoCoreError as error:
            raise InvalidArgumentError(
                f"{where} cannot be read: {error}; see docs/buckets.md"
            ) from None
        if region is not None:
            self.config["region"] = region

    def __call__(self) -> Any:
        """Return credentials, for obstore."""
        return self._provider(self._session(), ttl=LIFETIME)()


def profile_credentials(url: str, environment: Mapping[str, str]) -> ProfileCredentials | None:
    """Return the credentials of a configured profile; None to let obstore find others.

    Raises:
        InvalidArgumentError: the profile of the environment cannot be read, for example since boto3
            is not installed.
    """
    if any(environment.get(name) for name in OTHER_VARIABLES):
        return None
    profile = next((environment[n] for n in PROFILE_VARIABLES if environment.get(n)), None)
    if profile is None and not has_profile_file(environment):
        return None
    try:
        return ProfileCredentials(f"open {url}: the profile {profile or 'default'!r}")
    except ImportError as error:
        if profile is None:
            # A machine with such a file may have a role.
            return None
        raise InvalidArgumentError(
            f"open {url}: expected the package boto3, which reads the profile {profile!r} of the "
            f"environment; it is not installed; pip install '{EXTRA}'"
        ) from error


def has_profile_file(environment: Mapping[str, str]) -> bool:
    """Return whether a file with profiles exists."""
    return any(
        Path(environment.get(name) or default).expanduser().is_file()
        for name, default in PROFILE_FILES.items()
    )


def missing_hint() -> str:
    """Return what to do where no credentials are found; empty if there is nothing to add."""
    if has_profile_file(os.environ) and _boto3_is_missing():
        return f"; there is a file of profiles, which boto3 reads: pip install '{EXTRA}'"
    return ""


def _boto3_is_missing() -> bool:
    from importlib.util import find_spec

    return find_spec("boto3") is None
