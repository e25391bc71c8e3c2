"""What a value in a YAML file may be: one small function for each kind of value.

Each takes the value and returns it converted, or raises `ValueError` with the end of the sentence
"KEY: must be ...".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

AUTO = "auto"

Check = Callable[[object], Any]  # Any: a bool, a number, a text or a mapping, as the field says


def integer(low: int, high: int, *, multiple_of: int = 1) -> Check:
    """Accepts a whole number of that range."""

    def check(value: object) -> int:
        wanted = f"a whole number from {low} to {high}"
        if multiple_of > 1:
            wanted += f", a multiple of {multiple_of}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(wanted)
        if not low <= value <= high or value % multiple_of:
            raise ValueError(wanted)
        return value

    return check


def number(low: float, high: float) -> Check:
    """Accepts a number of that range, whole or not."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a number from {low:g} to {high:g}")
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def one_of(*words: str) -> Check:
    """Accepts one of these words."""

    def check(value: object) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return check


def auto_or(inner: Check) -> Check:
    """Accepts "auto" (or nothing), which becomes None, or what `inner` accepts."""

    def check(value: object) -> Any:  # Any: what `inner` returns
        if value is None or value == AUTO:
            return None
        try:
            return inner(value)
        except ValueError as error:
            raise ValueError(f"{AUTO!r} or {error}") from None

    return check


def text(value: object) -> str:
    """Accepts a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def folders(value: object) -> tuple[str, ...]:
    """Accepts a list of absolute folders, or one text of them as PATH has it; ~ is the home."""
    if value is None:
        return ()
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("a list of folders")
    found = tuple(os.path.expanduser(part.strip()) for part in parts if part.strip())
    if not all(os.path.isabs(part) for part in found):
        raise ValueError("a list of absolute folders")
    return found


def flag(value: object) -> bool:
    """Accepts true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def vendor_options(value: object) -> Mapping[str, Mapping[str, object]]:
    """Accepts vendor -> option -> value; what the options may be is the vendor's business."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("a mapping: vendor -> its options")
    for vendor, options in value.items():
        if options is not None and not isinstance(options, dict):
            raise ValueError(f"a mapping of option -> value for each vendor; {vendor!r} is not")
    return {vendor: options or {} for vendor, options in value.items()}
