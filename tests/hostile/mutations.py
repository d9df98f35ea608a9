"""Changes to JSON and to bytes as a stranger, a bad disk or a bad line would make them, from one generator."""

import copy
import json
import random
from typing import Any, Final
from zlib import crc32

from keepstep_agent.adapters.checksum import crc64nvme

NUMBERS: Final = (0, 1, -1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, 10**20, 10**9, 0.5, -0.0, 1e308)
TEXTS: Final = (
    "",
    "a" * 300,
    "../up",
    "/etc/passwd",
    "a/../b",
    ".keepstep/x",
    "a\x00b",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202egnp",
    "[red]x[/red]",
    "caf\u00e9\U0001f40b",
    "manifest-00000-00001.json",
    "0" * 16,
    "g" * 16,
    "-1",
    "NaN",
)
OTHERS: Final[tuple[Any, ...]] = (None, True, [], {}, [[]], [None], {"a": {"a": {}}})
RAW: Final = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b'"\xff\xfe"',
    b"[" * 20_000 + b"]" * 20_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b"[" + b"0," * 50_000 + b"0]",
    b'"' + b"x" * 500_000 + b'"',
    b"tru",
    b"",
)
"""What no JSON value says, or a parser may stumble over."""
_HOLE: Final = "\ue000hole\ue000"


def mutated_object(body: bytes, generator: random.Random, *, sealed: bool = True) -> bytes:
    """`body` is one of Keepstep's small objects. Half of what comes back has the checksum that its form wants.

    `sealed`: whether its form has one.
    """
    match generator.randrange(8):
        case 0:
            return _flipped(body, generator)
        case 1:
            return body[: generator.randrange(len(body) + 1)]
        case 2:
            return body + generator.choice([body, b"\n", b"\x00" * 100, b"}", generator.randbytes(40)])
        case 3:
            return generator.choice([b"", b"null", b"[]", b"{}", b"\n", generator.randbytes(200), b"[" * 200_000])
        case _:
            changed = _changed(body, generator)
            return _resealed(changed) if sealed else changed


def mutated_bytes(body: bytes, generator: random.Random) -> bytes:
    """Of a file that is no JSON: some of its bytes change, or it gets longer or shorter."""
    match generator.randrange(4):
        case 0:
            return body[: generator.randrange(len(body))]
        case 1:
            return body + generator.randbytes(generator.choice([1, 512, 100_000]))
        case _:
            changed = bytearray(body)
            for _ in range(generator.choice([1, 1, 50])):
                changed[generator.randrange(len(changed))] ^= generator.randrange(1, 256)
            return bytes(changed)


def naming(marker: bytes, manifest: bytes) -> bytes:
    """The marker, as if that manifest had been committed with it."""
    value = json.loads(marker)
    del value["crc32"]
    value["manifests"][0] |= {"size": len(manifest), "checksum": f"{crc64nvme(manifest):016x}"}
    return _resealed(json.dumps(value, separators=(",", ":")).encode())


def _flipped(body: bytes, generator: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(generator.choice([1, 1, 1, 8])):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _changed(body: bytes, generator: random.Random) -> bytes:
    """Members replaced, removed, added or doubled, as somebody does who knows the form."""
    value = json.loads(body)
    value.pop("crc32", None)
    raw = b""
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        places = list(_places(value))
        holder, key = generator.choice(places)
        match generator.randrange(7):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[generator.choice(["added", "__class__", "crc32", key + "x"])] = copy.deepcopy(
                    generator.choice(OTHERS)
                )
            case 2 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder[key]) for _ in range(generator.choice([1, 10, 2000])))
            case 3:
                holder[key] = _HOLE
                raw = generator.choice(RAW)
            case 4:
                holder[key] = copy.deepcopy(generator.choice(OTHERS))
            case 5:
                holder[key] = generator.choice(TEXTS)
            case _:
                holder[key] = generator.choice(NUMBERS)
    encoded = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return encoded.replace(json.dumps(_HOLE, ensure_ascii=False).encode(), raw)


def _places(value: Any) -> Any:
    """Every (holder, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in list(items):
        yield value, key
        yield from _places(member)


def _resealed(body: bytes) -> bytes:
    content = body.removesuffix(b"}")
    return content + b',"crc32":"%08x"}\n' % crc32(content)
