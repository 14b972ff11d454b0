"""Built-in policies as JSON, so that another process can evaluate them.

A message is one object: its `policy` names the class, its other members are the class's arguments.
An "any" holds built-in policies other than an "any", so that no message nests. Both sides are
Holdfasts that may differ in version, because an agent outlives its trainers: a name or an argument
that the reader does not know is refused, since a policy that is half understood would delete what
was to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from holdfast.errors import InvalidArgumentError

T = TypeVar("T")


class BuiltIn(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag=True
):
    """What makes a class a message; the name of the class is its name in messages."""


def encode(
    policy: object, members: Sequence[object], message_classes: tuple[type[BuiltIn], ...]
) -> bytes:
    """Return the JSON of `policy`.

    Args:
        policy: what to encode.
        members: the policies that an "any" holds; of any other policy, the policy itself.
        message_classes: the classes that members may have.

    Raises:
        InvalidArgumentError: a member is of another class. A subclass of a built-in one counts as
            another, because its methods would be lost.
    """
    for member in members:
        if type(member) not in message_classes:
            raise InvalidArgumentError(
                f"encode {type(policy).__name__}: expected built-in policies only, found "
                f"{type(member).__name__}; encode the built-in share that split() returns"
            )
    return msgspec.json.encode(policy)


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """What `decoder` makes of a message from outside.

    Raises:
        InvalidArgumentError: `data` is not such a message, or its arguments are not allowed.
    """
    try:
        return decoder.decode(data)
    # msgspec reports text that is not UTF-8 and objects that nest too deep with Python's errors.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"decode a policy: expected the JSON of a built-in policy, found {len(data)} bytes "
            f"that are none: {error}"
        ) from error
