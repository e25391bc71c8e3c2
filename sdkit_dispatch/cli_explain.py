"""`build --explain`: what the engines are made of, as their sessions tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import BuildResult
    from .component_build import ComponentBuild

COLUMNS: Mapping[str, str] = {
    "nodes": "operations",
    "copies": "copies",
    "arena_bytes": "compute buffer",
    "weights_bytes": "weights",
}
"""Fact of a session -> how the table names it. `copies` are operations that only move data."""
SHOWN_ELSEWHERE = frozenset({"device", "precision", "runtime"})


def explained(built: ComponentBuild) -> dict[str, Any]:  # Any: JSON data
    """Returns the numbers of one engine, None for what its vendor does not say, and other facts."""
    facts = built.manifest.facts
    others = {
        name: value
        for name, value in facts.items()
        if name not in COLUMNS and name not in SHOWN_ELSEWHERE
    }
    numbers = {name: int(facts[name]) if name in facts else None for name in COLUMNS}
    return {**numbers, "facts": others}


def print_explained(result: BuildResult) -> None:
    """Prints a table of the numbers, and every engine's other facts below it."""
    rows = {built.component: explained(built) for built in result.components}
    print(f"  {'':<15}" + "".join(f"{title:>16}" for title in COLUMNS.values()))
    for component, row in rows.items():
        print(f"  {component:<15}" + "".join(f"{_words(name, row[name]):>16}" for name in COLUMNS))
    for component, row in rows.items():
        words = ", ".join(f"{name} {value}" for name, value in row["facts"].items())
        print(f"  {component}: {words or 'its vendor says nothing more'}")


def _words(name: str, value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value / (1 << 20):.1f} MiB" if name.endswith("_bytes") else str(value)
