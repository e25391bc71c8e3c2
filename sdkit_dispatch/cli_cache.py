"""The commands `sdkit-dispatch cache ...`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import (
    Batch,
    EnvChoice,
    Gpu,
    Height,
    Json,
    PrecisionName,
    ProfileName,
    VendorName,
    Width,
    choice_of,
    dispatcher_of,
    duration_words,
    print_json,
    verdict_words,
)

if TYPE_CHECKING:
    from .deep_check import DeepResult

cache_app = typer.Typer(
    help="List, explain, verify and remove stored engines.", no_args_is_help=True
)


SORT_KEYS = ("key", "vendor", "size", "age", "use")


@cache_app.command("list", epilog="Example: sdkit-dispatch cache list --vendor cpu --sort size")
def cache_list(
    context: typer.Context,
    vendor: VendorName = None,
    component: Annotated[
        str | None, typer.Option("--component", help="Only this one: unet, vae_decoder, ...")
    ] = None,
    precision: PrecisionName = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Only those that cannot be read.")
    ] = False,
    sort: Annotated[
        str, typer.Option("--sort", help="vendor, size, age, use or key; the largest first.")
    ] = "vendor",
    as_json: Json = False,
) -> None:
    """List the stored engines."""
    from .contract import record_to_json
    from .errors import ConfigError
    from .store_cleaning import used_at_s

    if sort not in SORT_KEYS:
        raise ConfigError(f"--sort is '{sort}'; it may be {', '.join(SORT_KEYS)}")
    with dispatcher_of(context) as dispatcher:
        store = dispatcher.store
        asked = {"vendor": vendor, "component": component, "precision": precision}
        entries = [
            entry
            for entry in store.entries()
            if _is_asked(entry, asked) and (entry.damage or not damaged)
        ]
        used_s = {(entry.key, entry.folder): used_at_s(store, entry) for entry in entries}
    entries.sort(key=lambda entry: _rank(entry, sort, used_s[entry.key, entry.folder]))
    if as_json:
        rows = [
            {
                "key": entry.key,
                "damage": entry.damage,
                "folder": str(entry.folder),
                "is_shared": entry.is_shared,
                "size_bytes": entry.manifest.size_bytes if entry.manifest else None,
                "last_use": time_from_s(used_s[entry.key, entry.folder], "seconds"),
                "manifest": record_to_json(entry.manifest) if entry.manifest else None,
            }
            for entry in entries
        ]
        print_json({"engines": rows})
        return
    for entry in entries:
        manifest = entry.manifest
        if manifest is None:
            print(f"{entry.key[:12]}  damaged: {entry.damage}")
            continue
        request = manifest.request
        print(
            f"{entry.key[:12]}  {request.vendor:<12} {request.component:<15} "
            f"{request.precision:<5} {manifest.size_bytes / 1e6:8.1f} MB  "
            f"built {manifest.created_at[:10]}  "
            f"used {time_from_s(used_s[entry.key, entry.folder], 'minutes')[:16]}  "
            f"{shapes_words(request.shapes)}  {entry.damage or verdict_words(manifest.verdict)}"
            + ("  (shared)" if entry.is_shared else "")
        )
    total_mb = sum(entry.manifest.size_bytes for entry in entries if entry.manifest) / 1e6
    print(f"{len(entries)} engines, {total_mb:.1f} MB in {dispatcher.home}")


def _is_asked(entry: Any, asked: Mapping[str, str | None]) -> bool:  # Any: Entry, imported late
    """True for an entry that has every value that was asked for."""
    wanted = {name: value for name, value in asked.items() if value is not None}
    if entry.manifest is None:
        return not wanted
    return all(getattr(entry.manifest.request, name) == value for name, value in wanted.items())


def _rank(entry: Any, sort: str, used_s: float) -> tuple[Any, ...]:  # Any: Entry, imported late
    manifest = entry.manifest
    if manifest is None:
        return (1, entry.key)
    request = manifest.request
    ranks: dict[str, tuple[Any, ...]] = {
        "key": (entry.key,),
        "vendor": (request.vendor, request.component, request.precision, entry.key),
        "size": (-manifest.size_bytes,),
        "age": (manifest.created_at,),
        "use": (used_s,),
    }
    return (0, *ranks[sort])


def shapes_words(shapes: Mapping[str, Sequence[int]]) -> str:
    """Returns the shapes of a graph's inputs in one word: "sample 2x4x8x8, timestep -"."""
    return ", ".join(f"{name} {'x'.join(map(str, dims)) or '-'}" for name, dims in shapes.items())


def time_from_s(seconds: float, precision: str) -> str:
    """Returns a time, given in seconds since 1970, as ISO 8601 in UTC."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=precision)


@cache_app.command("explain", epilog="Example: sdkit-dispatch cache explain sample --vendor cpu")
def cache_explain(
    context: typer.Context,
    pipeline: Annotated[
        str, typer.Argument(help="A pipeline folder, 'sample', or the beginning of a key.")
    ] = "sample",
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    width: Width = None,
    height: Height = None,
    batch: Batch = None,
    env: EnvChoice = None,
    as_json: Json = False,
) -> None:
    """Say of a pipeline, or of a key, what is stored and differs."""
    from .contract import record_to_json

    choice = choice_of(gpu, vendor, precision, profile)
    with dispatcher_of(context, install=False, env=env) as dispatcher:
        if is_key(pipeline):
            _explain_key(dispatcher, pipeline, as_json=as_json)
            return
        rows = dispatcher.explain(pipeline, choice, width_px=width, height_px=height, batch=batch)
    if as_json:
        print_json({"components": [record_to_json(row) for row in rows]})
        return
    for row in rows:
        print(f"{row.component:<15} {row.status:<6} {row.key[:12]}  {row.message}")
        for difference in row.differences:
            print(f"    {difference.field}: {difference.stored} -> {difference.wanted}")


def is_key(text: str) -> bool:
    """True for what can only be the beginning of an engine's key."""
    is_hexadecimal = 4 <= len(text) <= 64 and not set(text) - set("0123456789abcdef")
    return is_hexadecimal and not Path(text).exists()


def _explain_key(dispatcher: Any, prefix: str, *, as_json: bool) -> None:
    # Any: Dispatcher, imported late
    from .contract import record_to_json

    found = dispatcher.explain_stored(prefix)
    entry = found.entry
    if as_json:
        print_json(
            {
                "key": entry.key,
                "status": found.status,
                "message": found.message,
                "is_shared": entry.is_shared,
                "manifest": record_to_json(entry.manifest) if entry.manifest else None,
                "nearest": found.nearest,
                "differences": [record_to_json(one) for one in found.differences],
            }
        )
        return
    print(f"{entry.key}  {found.status}: {found.message}")
    print(f"    in {entry.folder}")
    if entry.manifest is not None:
        manifest, request = entry.manifest, entry.manifest.request
        print(
            f"    {request.component} for {request.vendor} ({request.runtime}), "
            f"{request.precision}, target '{request.target}'"
        )
        print(f"    shapes {shapes_words(request.shapes)}")
        print(
            f"    graph {request.graph_digest[:12]}, weights {request.weights_digest[:12] or '-'}"
        )
        print(
            f"    built {manifest.created_at[:16]} UTC by {manifest.tool} in "
            f"{duration_words(manifest.build_s)}, {manifest.size_bytes / 1e6:.1f} MB, "
            f"{verdict_words(manifest.verdict)}"
        )
    if found.nearest:
        print(f"nearest: {found.nearest[:12]}")
    for difference in found.differences:
        print(f"    {difference.field}: {difference.stored} there, {difference.wanted} here")


@cache_app.command("verify", epilog="Example: sdkit-dispatch cache verify --deep")
def cache_verify(
    context: typer.Context,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Open every engine too, and compare it with the reference."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Hash every stored file."""
    from .contract import record_to_json
    from .lora.stored import merged_damage, merged_entries

    with dispatcher_of(context, install=False, is_quiet=as_json) as dispatcher:
        store = dispatcher.store
        swept = store.sweep()
        entries = list(store.entries())
        results = {entry.folder: store.verify(entry) for entry in entries}
        merged = {entry.folder: merged_damage(entry) for entry in merged_entries(store)}
        sound = [entry for entry in entries if not results[entry.folder]]
        opened: list[DeepResult] = []
        if deep:
            from .deep_check import check_deeply

            opened = check_deeply(dispatcher, sound)
    results |= merged
    damaged = {folder.name: damage for folder, damage in results.items() if damage}
    failed = [one for one in opened if one.status == "failed"]
    if as_json:
        document = {
            "verified": len(results),
            "merged": len(merged),
            "damaged": damaged,
            "swept": swept,
        }
        rows = [record_to_json(one) for one in opened]
        print_json({**document, "opened": rows} if deep else document)
    else:
        for key, damage in damaged.items():
            print(f"{key[:12]}  {damage}\n    -> sdkit-dispatch cache remove {key[:12]}")
        for one in opened:
            print(
                f"{one.key[:12]}  {one.status:<8} {one.vendor:<12} {one.component}: {one.message}"
            )
        words = f" and {len(merged)} pipelines with LoRAs" if merged else ""
        print(
            f"{len(results) - len(merged)} engines{words} verified, {len(damaged)} damaged, "
            f"{swept} leftovers removed"
        )
        if deep:
            counts = Counter(one.status for one in opened)
            print(
                f"{counts['passed']} compute what the reference does, "
                f"{counts['opened']} only open, {counts['failed']} are wrong, "
                f"{counts['unknown']} could not be checked here"
            )
    raise typer.Exit(4 if damaged or failed else 0)


@cache_app.command("remove", epilog="Example: sdkit-dispatch cache remove 3fa2c1")
def cache_remove(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(help="Beginnings of keys.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all engines.")] = False,
) -> None:
    """Remove stored engines."""
    from .errors import ConfigError
    from .lora.stored import merged_entries
    from .store_cleaning import removable

    with dispatcher_of(context) as dispatcher:
        store = dispatcher.store
        merged = list(merged_entries(store))
        entries = [
            entry
            for prefix in keys or ()
            for entry in (
                [one for one in merged if len(prefix) >= 4 and one.key.startswith(prefix)]
                or [dispatcher.stored(prefix)]
            )
        ]
        if everything:
            entries = removable(store)
        for entry in entries:
            if entry.is_shared:
                raise ConfigError(f"'{entry.folder}' is in a shared store, which is never written")
        if not entries and not everything:
            raise ConfigError("no key was given", "sdkit-dispatch cache list")
        for entry in entries:
            with store.locked(entry.key):
                store.remove(entry.key)
    print(f"{len(entries)} engines removed")
