"""Built-in policies as JSON, so that another process can evaluate them.

A message is one object: its `policy` names the class, its other members are the class's arguments.
An "any" contains built-in policies other than an "any", so that messages do not nest. The versions
of both sides may differ, because an agent outlives its trainers. An unknown name or argument is
refused, since a partly understood policy could delete checkpoints that should be kept.
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
    """The base of classes that are messages; the class name is the name in messages."""


def encode(
    policy: object, members: Sequence[object], message_classes: tuple[type[BuiltIn], ...]
) -> bytes:
    """Return the JSON of `policy`.

    Args:
        policy: the policy to encode.
        members: the members of an "any"; for any other policy, the policy itself.
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
    """Return the policy that `decoder` reads from a message from outside.

    Raises:
        InvalidArgumentError: `data` is not such a message, or its arguments are not allowed.
    """
    try:
        return decoder.decode(data)
    # msgspec raises Python's own errors for invalid UTF-8 and for too deep nesting.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"decode a policy: expected the JSON of a built-in policy, found {len(data)} bytes "
            f"that are not: {error}"
        ) from error
