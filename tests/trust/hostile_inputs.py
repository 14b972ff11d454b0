"""Hostile input from a seed: records, values, names and messages, spoilt with and without a seal.

What is sound is held as Python objects. A mutation copies the nodes on its way and changes one; so
an input costs some microseconds. The n-th input of a target follows from the seed and n alone.
"""

from __future__ import annotations

import json
import random
from typing import Any

import xxhash

from holdfast.format.sealed import seal
from holdfast.format.values import encode_value
from holdfast.host.wire import protocol
from holdfast.observe.events.schema import StateRestored
from holdfast.policy import (
    preservation_evaluation,
    preservation_policy,
    save_decision_policy,
    save_evaluation,
)
from tests.attempts import checkpoint_id

Json = Any

HUGE = 10**4000
NASTY: list[Json] = [
    *(None, True, False, 0, -1, 1, 2, 63, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**6, 10**9, 10**12, 10**15 + 1, 2**60, 2**70, HUGE, -HUGE, 0.0, -0.0, 0.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), -float("inf")),
    *(
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\0b",
        "%2F",
        "[0:1]",
        "\n",
        "x" * 300,
    ),
    *(
        "__metadata__",
        "nan",
        "inf",
        "-inf",
        "0x",
        "0x" + "f" * 5000,
        "1",
        "٣",
        "\u202e",
        "😀",
        "\ud800",
    ),
    *("float32", "uint8", "int4", "complex128", "object", "O", "V8", "str", "float32\0"),
    *(
        "0" * 32,
        "g" * 32,
        "0" * 31,
        "AAE=",
        "AAE",
        "=",
        "2026-08-01T12:00:00",
        "0001-01-01T00:00:00Z",
    ),
    *(
        [],
        {},
        [[]],
        [0],
        [1, 2],
        [[0, 1]],
        [[0, 10**6]],
        [[-1, 1]],
        [10**12],
        [10**6] * 2,
        [1] * 65,
    ),
    *([2**40, 0], [0] * 64, ["a"], [["a"]], [None]),
    *({"int": "0x1"}, {"int": 1}, {"tuple": []}, {"dict": [[[], 1]]}, {"dict": [[1, 2], [1, 3]]}),
    *({"bytes": "A"}, {"array": {}}, {"array": {"dtype": "int8", "shape": [2**62, 0], "data": ""}}),
    *({"scalar": {"dtype": "bool", "shape": [], "data": "Ag=="}}, {"a": 1, "b": 2}, {"int": {}}),
]
TOKENS = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-", b"1.", b"01", b"\xff", b"\xed\xa0\x80"),
    *(b"\\ud800", b"\\u0000", b"null", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\0", b"\n"),
    *(b'"step":7,', b'"rank":0,"rank":1,', b'"a":{"a":1,"a":2},', b"9" * 5000, b"[" * 2000),
    *(b'"format_version":2,', b'"format_version":0,', b'"format_version":1e0,', b'","digest":"'),
]


def mutated(rng: random.Random, tree: Json, deeper: float = 0.85) -> Json:
    """`tree` with one node changed; what it shares with `tree` is not touched."""
    if isinstance(tree, dict) and tree and rng.random() < deeper:
        key = rng.choice(list(tree))
        return {**tree, key: mutated(rng, tree[key], deeper)}
    if isinstance(tree, list) and tree and rng.random() < deeper:
        index = rng.randrange(len(tree))
        return [*tree[:index], mutated(rng, tree[index], deeper), *tree[index + 1 :]]
    return _changed(rng, tree)


def _changed(rng: random.Random, node: Json) -> Json:
    way = rng.random()
    if way < 0.5 or node is None:
        return rng.choice(NASTY)
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        return rng.choice([node + 1, node - 1, -node, node * 2, node << 40, float(node % 2**53)])
    if isinstance(node, str):
        cut = rng.randrange(len(node) + 1)
        return rng.choice(
            [node[:cut], node + node, node[:cut] + rng.choice("/.%[\0é") + node[cut:]]
        )
    if isinstance(node, list):
        item = rng.choice(node) if node else rng.choice(NASTY)
        return rng.choice([node[:-1], [*node, item], node[::-1], [*node, *node], [node], item])
    if isinstance(node, dict):
        left = dict(node)
        if left and way < 0.75:
            del left[rng.choice(list(left))]
            return left
        return {**left, rng.choice(["x", "digest", *left]): rng.choice(NASTY)}
    return nested(rng.choice([1, 50, 99, 101, 150]), node)


def nested(depth: int, node: Json) -> Json:
    for _ in range(depth):
        node = [node]
    return node


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with some bytes changed, cut out, doubled or put in."""
    start = rng.randrange(len(data) + 1)
    stop = min(start + rng.choice([0, 1, 1, 8, 100]), len(data))
    match rng.randrange(6):
        case 0 if start < len(data):
            return data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :]
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:stop] + data[start:stop] + data[stop:]
        case 3:
            return data[:start] + rng.randbytes(stop - start) + data[stop:]
        case 4:
            return data[:start]
    return data[:start] + rng.choice(TOKENS) + data[start:]


def sealed(body: bytes) -> bytes:
    """`body`, a JSON object without its end, with the digest that belongs to it."""
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def sealed_json(tree: Json) -> bytes:
    """A record of these members, with the right digest."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    return sealed(text.encode("utf-8", "surrogatepass")[:-1])


def spoilt_record(rng: random.Random, tree: dict[str, Json]) -> bytes:
    """A record that is sealed, most of the time, and not what it should be."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        tree = mutated(rng, tree)
    data = sealed_json(tree if isinstance(tree, dict) and tree else {"x": tree})
    way = rng.random()
    if way < 0.2:
        # As spoilt bytes, under a digest of their own.
        return sealed(mutated_bytes(rng, data[:-46]))
    return data if way < 0.95 else mutated_bytes(rng, data)


def as_json(record: Any) -> dict[str, Json]:
    """A record as Python objects, without its digest."""
    found = json.loads(seal(record))
    del found["digest"]
    return found


VALUES = [
    encode_value(value, "v")
    for value in (
        {"a": (1, 2.5, None, True, "x"), "b": [b"\0\1", 2**80, float("nan")], 3: {(1, 2): []}},
        [{"deep": [[[[("x",)]]]]}, -(2**90), float("-inf"), "é😀"],
    )
] + [
    {"array": {"dtype": "float32", "shape": [2, 2], "data": "AAAAAAAAAAAAAAAAAAAAAA=="}},
    {"scalar": {"dtype": "int64", "shape": [], "data": "AQAAAAAAAAA="}},
]

NAMES = [
    *(
        "000000120.3-9f2c41ab",
        "1000000000.1-9f2c41ab",
        "0000000120.3-9f2c41ab",
        "000000120.03-9f2c41ab",
        "1000000000000000.999999999-00000000",
    ),
    *("part-00000-of-00002.json", "part-1000000-of-1000000.json", "part-00002-of-00002.json"),
    *(
        "000000001.json",
        "000000001.copy.json",
        "0999999999999880-000000120.3-9f2c41ab.json",
        "image-00000-of-00002.safetensors",
    ),
    "image-00000-of-00002.from-000000120.3-9f2c41ab.safetensors",
    *(
        ".hidden",
        "..",
        ".",
        "a/b",
        "",
        "00000012٣.3-9f2c41ab",
        "000000120.3-9f2c41ab\n",
        "part-+0001-of-00002.json",
    ),
]


def spoilt_name(rng: random.Random) -> str:
    """A name near to those of the format."""
    name = rng.choice(NAMES)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(name) + 1)
        put = rng.choice(
            ["0", "9", ".", "-", "/", "\0", " ", "\n", "٣", "\udcff", "%", "1" * 20, ""]
        )
        name = name[:at] + put + name[at + rng.randrange(2) :]
    return name


_DURABLE = protocol.TierPolicies(
    save=save_evaluation.encode(save_decision_policy.FixedIntervalPolicy(4)).decode(),
    preserve=preservation_evaluation.encode(preservation_policy.LatestN(2)).decode(),
)
ONE = checkpoint_id(1)
MESSAGES: dict[str, Any] = {
    "attach": protocol.Attach(
        group="g",
        rank=0,
        count=1,
        attempt=None,
        takeover=False,
        durable=_DURABLE,
        ram=_DURABLE,
        ram_limit_bytes=1 << 20,
        linger_secs=1.0,
    ),
    "branch": protocol.Branch(group="g", rank=0, attempt=ONE.attempt, origin=ONE),
    "slot": protocol.WantSlot(rank=0, id=ONE, size_bytes=4096),
    "sealed": protocol.Sealed(
        rank=0, id=ONE, part_count=1, tier=protocol.PartTier.RAM, durable=True
    ),
    "abandoned": protocol.Abandoned(rank=0, id=ONE, reason="r"),
    "watch": protocol.Watch(group="g", rank=0, cursor=0),
    "judged": protocol.Judged(newest=ONE, keep=(ONE,)),
    "vouched": protocol.Vouched(step=3),
    "request": protocol.RequestSave(),
    "delete": protocol.Delete(ids=(ONE,)),
    "report": protocol.EventReport(
        event=StateRestored(step=1, attempt=1, rank=0, sources={"ram": 8}, secs=0.5)
    ),
    "detach": protocol.Detach(group="g", rank=0),
    "status": protocol.Empty(),
    "job": protocol.Empty(),
    "stop": protocol.Stop(),
}


def spoilt_message(rng: random.Random, name: str) -> bytes:
    """A message of that route, spoilt; now and then it is sound."""
    tree = json.loads(_ENCODED[name])
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        tree = mutated(rng, tree)
    data = json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, data) if rng.random() < 0.15 else data


def _encode(message: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(message)


_ENCODED = {name: _encode(message) for name, message in MESSAGES.items()}
