"""The commands `sdkit-dispatch vendors ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import (
    Json,
    Quiet,
    ask,
    dispatcher_of,
    print_json,
    spec_named,
)

Variant = Annotated[
    str | None,
    typer.Option("--variant", help="Build of the runtime: cu12 or cu13; by the driver here."),
]

vendors_app = typer.Typer(
    help="List, install and remove vendor environments.", no_args_is_help=True
)


@vendors_app.command("list", epilog="Example: sdkit-dispatch vendors list --json")
def vendors_list(context: typer.Context, as_json: Json = False) -> None:
    """Show every vendor's state."""
    from .contract import record_to_json

    with dispatcher_of(context) as dispatcher:
        states = dispatcher.vendor_states()
    if as_json:
        print_json({"vendors": [record_to_json(one) for one in states]})
        return
    for one in states:
        print(f"{one.vendor:<14}{one.state:<16}{one.message} {one.version}".rstrip())
        if one.action:
            print(f"{'':<30}-> {one.action}")


@vendors_app.command("install", epilog="Example: sdkit-dispatch vendors install openvino")
def vendors_install(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A vendor, or 'auto' for this machine's best.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Folder made by 'vendors download'.")
    ] = None,
    variant: Variant = None,
    reinstall: Annotated[
        bool, typer.Option("--reinstall", help="Make it even if there is a good one.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask, on a terminal; elsewhere it never asks."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Make a vendor's environment; says first what it downloads and how big that is."""
    from .env import install, plan_install

    with dispatcher_of(context, is_quiet=quiet) as dispatcher:
        spec = _with_variant(dispatcher, spec_named(dispatcher, name), variant)
        plan = plan_install(spec, home=dispatcher.home, source=source, report=dispatcher.report)
        print(plan.summary, flush=True)
        if spec.install_note:
            print(f"note: {spec.install_note}", file=sys.stderr)
        if not yes and sys.stdin.isatty() and not ask("Install now?"):
            raise typer.Abort
        environment = install(
            spec,
            home=dispatcher.home,
            report=dispatcher.report,
            source=source,
            plan=plan,
            reinstall=reinstall,
        )
    versions = ", ".join(f"{key} {value}" for key, value in environment.packages.items())
    print(f"{spec.name} is ready: {versions} in {environment.folder}")


@vendors_app.command(
    "download", epilog="Example: sdkit-dispatch vendors download openvino --to wheels"
)
def vendors_download(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A vendor.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the wheels.")],
    variant: Variant = None,
    quiet: Quiet = False,
) -> None:
    """Fetch a vendor's packages, for 'vendors install --from' on a machine without internet."""
    from .env import download

    with dispatcher_of(context, is_quiet=quiet) as dispatcher:
        spec = _with_variant(dispatcher, spec_named(dispatcher, name), variant)
        download(spec, to=to, report=dispatcher.report)
    chosen = f" --variant {spec.variant}" if spec.variants else ""
    print(f"on the other machine: sdkit-dispatch vendors install {spec.name} --from {to}{chosen}")


@vendors_app.command("remove", epilog="Example: sdkit-dispatch vendors remove openvino")
def vendors_remove(
    context: typer.Context, name: Annotated[str, typer.Argument(help="A vendor.")]
) -> None:
    """Remove a vendor's environment."""
    from .env import remove

    with dispatcher_of(context) as dispatcher:
        spec = spec_named(dispatcher, name)
        removed = remove(spec, home=dispatcher.home)
    print(f"{spec.name}: {'removed' if removed else 'there was no environment'}")


def _with_variant(dispatcher: Any, spec: Any, name: str | None) -> Any:
    # Any: Dispatcher and VendorSpec, imported late.
    from .errors import ConfigError

    if name is None:
        return dispatcher.suited(spec)
    known = [one for one in (spec.variant, *spec.variants) if one]
    if name not in known:
        there_are = f"its builds are {', '.join(known)}" if known else "it has one build only"
        raise ConfigError(
            f"--variant is '{name}', and {spec.name} has no such build: {there_are}",
            f"sdkit-dispatch vendors install {spec.name}",
        )
    return spec.of_variant(name)
