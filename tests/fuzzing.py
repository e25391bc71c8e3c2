"""What the fuzz tests share: mutations of sound data, a budget, and bounds on time and memory.

In a normal run every test tries the same few hundred examples. With FUZZ_SECONDS=600 in the
environment every test tries new ones for that long.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

EXAMPLE_LIMIT_S = 20.0
"""Of processor time; examples take milliseconds. What loops or expands takes more, or for ever."""
MEMORY_LIMIT_BYTES = 1 << 30
"""Beyond what the process has when a test begins: a claim that is believed exceeds it."""
FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
ROUND = 500

ODD_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
ODD_BYTES = [
    b"\0",
    b"\xff" * 8,
    b"../",
    b"..\\",
    b"\n",
    b'"',
    b"{",
    b"[",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"nan",
    b"-",
    b"9" * 30,
    *(
        number.to_bytes(size, "little")
        for number in ODD_NUMBERS
        for size in (4, 8)
        if number < 256**size
    ),
]
ODD_JSON = st.sampled_from(
    [
        *(None, True, 0, -1, 2**31, 2**63, 2**70, -(2**63), 1e308, -0.0, 0.5, "", "\ud800", "\0"),
        *("../../x", "x" * 5000, "é", [], {}, [[]], [None], {"": None}, {"a": [1]}, [0] * 50),
    ]
)


def fuzz(strategy: st.SearchStrategy, check: Callable, *, examples: int) -> None:
    """Runs `check` on examples: a fixed set of them, or new ones until the time is up."""

    def bounded(example) -> None:
        started_s = time.process_time()
        check(example)
        assert time.process_time() - started_s < EXAMPLE_LIMIT_S

    def one_round(count: int, *, is_fixed: bool) -> None:
        rules = settings(
            max_examples=count,
            derandomize=is_fixed,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # Shrinking what takes long, takes long; the example itself is printed all the same.
            phases=[Phase.generate] if is_fixed else [Phase.generate, Phase.shrink],
        )
        test = rules(given(strategy)(bounded))
        (test if is_fixed else hypothesis.seed(random.getrandbits(64))(test))()

    with bounded_memory():
        if not FUZZ_SECONDS:
            one_round(examples, is_fixed=True)
            return
        end_s = time.monotonic() + FUZZ_SECONDS
        while time.monotonic() < end_s:
            one_round(ROUND, is_fixed=False)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Makes an allocation beyond the limit a MemoryError, where the system can do that."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_bytes = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Sound bytes with one to four things done to them."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(result) - 1, 0)))
        length = draw(st.integers(0, 64))
        match draw(st.sampled_from(["flip", "set", "odd", "insert", "delete", "double", "cut"])):
            case "flip" if result:
                result[start] ^= 1 << draw(st.integers(0, 7))
            case "set":
                result[start : start + 1] = draw(st.binary(min_size=1, max_size=1))
            case "odd":
                odd = draw(st.sampled_from(ODD_BYTES))
                result[start : start + len(odd)] = odd
            case "insert":
                result[start:start] = draw(st.sampled_from(ODD_BYTES) | st.binary(max_size=16))
            case "delete":
                del result[start : start + length]
            case "double":
                result[start:start] = result[start : start + length]
            case "cut" if draw(st.booleans()):
                del result[start:]
    return bytes(result)


@st.composite
def changed_json(draw: st.DrawFn, document: object) -> object:
    """JSON data with one to three values replaced, removed or added somewhere in it."""
    result = copied(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(containers(result))
        if not places:
            break
        place = draw(st.sampled_from(places))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "add" or not keys:
            add(place, draw(ODD_JSON | st.text(max_size=5)), draw(st.text(max_size=5)))
        elif action == "remove":
            del place[draw(st.sampled_from(keys))]
        else:
            place[draw(st.sampled_from(keys))] = copied(draw(ODD_JSON))
    return result


def add(place: dict | list, value: object, name: str) -> None:
    if isinstance(place, dict):
        place[name] = copied(value)
    else:
        place.append(copied(value))


def containers(document: object) -> Iterator[dict | list]:
    if isinstance(document, dict | list):
        yield document
        children = document.values() if isinstance(document, dict) else document
        for child in children:
            yield from containers(child)


def copied(document: object) -> object:
    if isinstance(document, dict):
        return {name: copied(value) for name, value in document.items()}
    return [copied(value) for value in document] if isinstance(document, list) else document
