"""The commands `sdkit-dispatch cache ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import (
    Batch,
    EnvChoice,
    Gpu,
    Height,
    Json,
    PipelinePath,
    PrecisionName,
    ProfileName,
    VendorName,
    Width,
    choice_of,
    dispatcher_of,
    print_json,
    verdict_words,
)

cache_app = typer.Typer(
    help="List, explain, verify and remove stored engines.", no_args_is_help=True
)


@cache_app.command("list", epilog="Example: sdkit-dispatch cache list")
def cache_list(context: typer.Context, as_json: Json = False) -> None:
    """List the stored engines."""
    from .contract import record_to_json

    with dispatcher_of(context) as dispatcher:
        entries = list(dispatcher.store.entries())
    if as_json:
        rows = [
            {
                "key": entry.key,
                "damage": entry.damage,
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
            f"{entry.key[:12]}  {request.vendor:<10} {request.component:<15} "
            f"{request.precision:<5} {manifest.size_bytes / 1e6:8.1f} MB  "
            f"{manifest.created_at[:16]}  {verdict_words(manifest.verdict)}"
        )
    total_mb = sum(entry.manifest.size_bytes for entry in entries if entry.manifest) / 1e6
    print(f"{len(entries)} engines, {total_mb:.1f} MB in {dispatcher.home}")


@cache_app.command("explain", epilog="Example: sdkit-dispatch cache explain sample --vendor cpu")
def cache_explain(
    context: typer.Context,
    pipeline: PipelinePath = "sample",
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
    """Say for each component whether its engine is stored, and what differs if it is not."""
    choice = choice_of(gpu, vendor, precision, profile)
    with dispatcher_of(context, install=False, env=env) as dispatcher:
        rows = dispatcher.explain(pipeline, choice, width_px=width, height_px=height, batch=batch)
    if as_json:
        from .contract import record_to_json

        print_json({"components": [record_to_json(row) for row in rows]})
        return
    for row in rows:
        print(f"{row.component:<15} {row.status:<6} {row.key[:12]}  {row.message}")
        for difference in row.differences:
            print(f"    {difference.field}: {difference.stored} -> {difference.wanted}")


@cache_app.command("verify", epilog="Example: sdkit-dispatch cache verify")
def cache_verify(context: typer.Context, as_json: Json = False) -> None:
    """Hash every stored file."""
    with dispatcher_of(context) as dispatcher:
        store = dispatcher.store
        swept = store.sweep()
        results = {entry.key: store.verify(entry) for entry in store.entries()}
    damaged = {key: damage for key, damage in results.items() if damage}
    if as_json:
        print_json({"verified": len(results), "damaged": damaged, "swept": swept})
    else:
        for key, damage in damaged.items():
            print(f"{key[:12]}  {damage}\n    -> sdkit-dispatch cache remove {key[:12]}")
        print(f"{len(results)} engines verified, {len(damaged)} damaged, {swept} leftovers removed")
    raise typer.Exit(4 if damaged else 0)


@cache_app.command("remove", epilog="Example: sdkit-dispatch cache remove 3fa2c1")
def cache_remove(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(help="Beginnings of keys.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all engines.")] = False,
) -> None:
    """Remove stored engines."""
    from .errors import ConfigError

    with dispatcher_of(context) as dispatcher:
        store = dispatcher.store
        entries = list(store.entries()) if everything else []
        for prefix in keys or ():
            found = store.find(prefix)
            if len(found) != 1:
                raise ConfigError(
                    f"{len(found)} stored engines have a key that starts with '{prefix}'",
                    "sdkit-dispatch cache list",
                )
            entries += found
        if not entries and not everything:
            raise ConfigError("no key was given", "sdkit-dispatch cache list")
        for entry in entries:
            with store.locked(entry.key):
                store.remove(entry.key)
    print(f"{len(entries)} engines removed")
