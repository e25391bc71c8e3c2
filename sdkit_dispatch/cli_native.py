"""The command `sdkit-dispatch vendors build`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import Json, Quiet, dispatcher_of, print_json, spec_named

if TYPE_CHECKING:
    from .api import Dispatcher
    from .contract import VendorSpec
    from .native.recipe import Recipe


def vendors_build(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A vendor.")],
    variant: Annotated[
        str | None, typer.Option("--with", help="cpu, cuda, hip, vulkan, sycl or metal.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Source archive, instead of downloading it.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Compilers at once.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what was built for this vendor.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Build a vendor's runtime with the compilers of this machine."""
    from .contract import record_to_json
    from .errors import ConfigError
    from .native.building import build
    from .native.builds import builds_folder, remove_builds
    from .native.recipe import recipe_of

    with dispatcher_of(context, is_quiet=quiet or as_json) as dispatcher:
        spec = spec_named(dispatcher, name)
        if remove:
            count = remove_builds(spec.name, dispatcher.home)
            if as_json:
                print_json({"removed": count})
            else:
                print(f"{spec.name}: {count} build{'' if count == 1 else 's'} removed")
            return
        if variant is None:
            known = ", ".join(recipe_of(spec).variants)
            raise ConfigError(
                f"with what? --with may be {known}",
                f"sdkit-dispatch vendors build {spec.name} --with cpu",
            )
        made = build(
            spec,
            variant,
            home=dispatcher.home,
            accept=partial(_try, dispatcher, spec),
            source=source,
            jobs=jobs,
            report=dispatcher.report,
        )
        folder = builds_folder(spec.name, dispatcher.home) / made.fingerprint
    if as_json:
        print_json({"build": record_to_json(made), "folder": str(folder)})
        return
    size_mb = made.size_bytes / 1e6
    print(f"{spec.name}: {made.words}, {size_mb:.0f} MB in {folder}")
    if not made.runtime:
        print(f"not tried yet -> sdkit-dispatch vendors install {spec.name}")


def _try(dispatcher: Dispatcher, spec: VendorSpec, recipe: Recipe, folder: Path) -> str:
    """Lets the vendor compute something with a build; returns the runtime as it names it.

    Raises:
        VendorEnvError: It does not serve the processor.
    """
    from .contract import Rejection
    from .errors import VendorEnvError, WorkerError

    if isinstance(dispatcher.workers.environment(spec), Rejection):
        return ""  # tried once it is installed, as any runtime is
    processor = next(device for device in dispatcher.devices if device.kind == "cpu")
    try:
        with dispatcher.workers.fresh(
            spec, variables={recipe.only_variable: str(folder)}
        ) as client:
            answer = client.probe(processor)
    except WorkerError as error:
        raise VendorEnvError(f"the build does not run: {error.message}", error.hint) from error
    if isinstance(answer, Rejection):
        raise VendorEnvError(f"the build does not serve: {answer.reason}")
    return answer
