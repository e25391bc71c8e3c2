"""Why an engine is stored or not, and what differs from its nearest neighbour."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from .cache import EngineStore, Entry
from .contract import BuildRequest, record_to_json


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field in which a request differs from the nearest engine in the store."""

    field: str
    wanted: str
    stored: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Whether an engine is stored, and what differs from the nearest one if it is not."""

    component: str
    key: str
    status: Literal["hit", "miss", "damaged"]
    message: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EntryExplanation:
    """What a stored engine is, and how it differs from the nearest other one.

    Attributes:
        nearest: Key of the nearest other engine of the component; empty if there is none.
        differences: `wanted` is this engine's value, `stored` the nearest one's.
    """

    entry: Entry
    status: Literal["sound", "damaged"]
    message: str
    nearest: str = ""
    differences: tuple[Difference, ...] = ()


def explain(store: EngineStore, request: BuildRequest) -> Explanation:
    """Says whether the engine of `request` is stored; if not, what differs from the nearest."""
    entry = store.read(request.key)
    if entry is not None:
        damage = store.verify(entry)
        return Explanation(
            component=request.component,
            key=request.key,
            status="damaged" if damage else "hit",
            message=damage or "stored, and its files are as they were built",
        )
    nearest = _nearest(store, request)
    return Explanation(
        component=request.component,
        key=request.key,
        status="miss",
        message=_words(nearest, "no engine of this component is stored yet"),
        differences=nearest[1] if nearest else (),
    )


def explain_entry(store: EngineStore, entry: Entry) -> EntryExplanation:
    """Says what a stored engine is, whether it is sound, and what its nearest neighbour is."""
    damage = store.verify(entry)
    nearest = _nearest(store, entry.manifest.request) if entry.manifest else None
    message = damage or _words(nearest, "it is the only engine of its component")
    return EntryExplanation(
        entry=entry,
        status="damaged" if damage else "sound",
        message=message,
        nearest=nearest[0] if nearest else "",
        differences=nearest[1] if nearest else (),
    )


def _words(nearest: tuple[str, tuple[Difference, ...]] | None, alone: str) -> str:
    if nearest is None:
        return alone
    names = ", ".join(difference.field for difference in nearest[1])
    return f"differs from the nearest stored engine in {names}"


def _nearest(
    store: EngineStore, request: BuildRequest
) -> tuple[str, tuple[Difference, ...]] | None:
    """Returns key and differences of the nearest other engine of the component."""
    wanted = _flat(record_to_json(request))
    nearest: tuple[tuple[int, str], str, tuple[Difference, ...]] | None = None
    for entry in store.entries():
        if entry.manifest is None or entry.manifest.request.component != request.component:
            continue
        stored = _flat(record_to_json(entry.manifest.request))
        names = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
        if not names:  # itself, here or in a shared store
            continue
        differences = tuple(
            Difference(field=name, wanted=wanted.get(name, "-"), stored=stored.get(name, "-"))
            for name in names
        )
        # The newest of equally near entries: it is the one that the user just had.
        rank = (-len(differences), entry.manifest.created_at)
        if nearest is None or rank > nearest[0]:
            nearest = rank, entry.key, differences
    return None if nearest is None else nearest[1:]


def _flat(data: Any, prefix: str = "") -> dict[str, str]:  # Any: JSON data
    """Nested JSON objects -> {"shapes.sample": "[1, 4, 8, 8]"}."""
    if not isinstance(data, dict):
        return {prefix: data if isinstance(data, str) else json.dumps(data)}
    flat: dict[str, str] = {}
    for name, value in data.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat
