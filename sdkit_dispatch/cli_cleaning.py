"""The commands that say what the engine store takes, and make it smaller."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from .cli_cache import cache_app
from .cli_options import DryRun, Json, dispatcher_of, print_json

DAY_S = 86400.0
UNITS_S = {"h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}
UNITS_BYTES = {"mb": 10**6, "gb": 10**9, "tb": 10**12}


@cache_app.command("du", epilog="Example: sdkit-dispatch cache du")
def cache_du(context: typer.Context, as_json: Json = False) -> None:
    """Show what the engines take on the disk."""
    from .contract import record_to_json
    from .lora.stored import merged_entries
    from .store_cleaning import folder_bytes, usage

    with dispatcher_of(context) as dispatcher:
        home = dispatcher.home
        rows = usage(entry for entry in dispatcher.store.entries() if not entry.is_shared)
        merged = usage(merged_entries(dispatcher.store))
        other = {
            name: folder_bytes(home / name)
            for name in ("references", "scratch", "suites", "tmp", "env")
            if (home / name).is_dir()
        }
    total_bytes = sum(row.own_bytes for row in rows)
    if as_json:
        print_json(
            {
                "home": str(home),
                "engines": [record_to_json(row) for row in rows],
                "engines_bytes": total_bytes,
                "merged": [record_to_json(row) for row in merged],
                "other_bytes": other,
            }
        )
        return
    for row in rows:
        print(
            f"{row.own_bytes / 1e6:12.1f} MB  {row.vendor:<14} {row.component:<16} "
            f"{row.engines} engines"
            + (
                f", {row.size_bytes / 1e6:.1f} MB with what they share"
                if row.size_bytes != row.own_bytes
                else ""
            )
        )
    print(f"{total_bytes / 1e6:12.1f} MB  engines together")
    for row in merged:
        print(
            f"{row.own_bytes / 1e6:12.1f} MB  {row.engines} pipelines with LoRAs in their weights"
        )
    for name, size_bytes in other.items():
        print(f"{size_bytes / 1e6:12.1f} MB  {name}")


@cache_app.command("prune", epilog="Example: sdkit-dispatch cache prune --older-than 30d --dry-run")
def cache_prune(
    context: typer.Context,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Not used for so long: 12h, 30d, 8w.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", help="The longest unused, until the rest fits: 500MB, 20GB."),
    ] = None,
    superseded: Annotated[
        bool,
        typer.Option("--superseded", help="Of an adapter or runtime that is no longer here."),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove old, superseded or excess engines and merged LoRAs; none in use."""
    from . import store_cleaning as cleaning
    from .contract import record_to_json
    from .errors import ConfigError

    if older_than is None and max_size is None and not superseded:
        raise ConfigError("nothing was asked for", "sdkit-dispatch cache prune --older-than 30d")
    age_s = None if older_than is None else seconds_from_text(older_than)
    limit_bytes = None if max_size is None else bytes_from_text(max_size)
    with dispatcher_of(context, install=False, is_quiet=as_json) as dispatcher:
        store = dispatcher.store
        ours = cleaning.removable(store)
        chosen: dict[str, cleaning.Removal] = {}
        if age_s is not None:
            old = cleaning.unused_since(store, ours, before_s=time.time() - age_s)
            chosen |= {one.key: one for one in old}
        if superseded:
            chosen |= {one.key: one for one in dispatcher.superseded(ours)}
        removals = list(chosen.values())
        if not dry_run:
            removals = cleaning.remove_unused(store, removals)
        if limit_bytes is not None:
            rest = [entry for entry in ours if entry.key not in chosen]
            removals += (
                cleaning.over_size(store, rest, limit_bytes=limit_bytes)
                if dry_run
                else cleaning.shrink(store, limit_bytes=limit_bytes)
            )
    freed_bytes = sum(one.frees_bytes for one in removals)
    gone = [one for one in removals if not one.kept]
    if as_json:
        rows = [record_to_json(one) for one in removals]
        print_json({"dry_run": dry_run, "engines": rows, "freed_bytes": freed_bytes})
        return
    for one in removals:
        kept = f"; it stays: {one.kept}" if one.kept else ""
        print(
            f"{one.key[:12]}  {one.vendor:<14} {one.component:<16} "
            f"{one.frees_bytes / 1e6:8.1f} MB  {one.reason}{kept}"
        )
    verb = "would be removed" if dry_run else "removed"
    print(f"{len(gone)} engines {verb}, {freed_bytes / 1e6:.1f} MB")


def seconds_from_text(text: str) -> float:
    """Returns the seconds that "12h", "30d" or "8w" are.

    Raises:
        ConfigError: It is something else.
    """
    return _amount("--older-than", text, UNITS_S)


def bytes_from_text(text: str) -> int:
    """Returns the bytes that "500MB", "20GB" or "0" are; 1 MB is 10**6.

    Raises:
        ConfigError: It is something else.
    """
    return int(_amount("--max-size", text, UNITS_BYTES))


def _amount(option: str, text: str, units: dict[str, float] | dict[str, int]) -> float:
    from .errors import ConfigError

    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) *([a-z]*)", text.strip().lower())
    if found is not None and not float(found[1]) and not found[2]:
        return 0.0  # nothing is the same in every unit
    if found is None or found[2] not in units:
        raise ConfigError(
            f"{option} is '{text}'; it is a number and one of {', '.join(units)}",
            f"give 30{next(iter(units))}, for example",
        )
    return float(found[1]) * units[found[2]]
