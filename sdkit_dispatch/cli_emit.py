"""The command `sdkit-dispatch emit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    Batch,
    Check,
    EnvChoice,
    Gpu,
    Height,
    Install,
    Json,
    Loras,
    PrecisionName,
    ProfileName,
    Quiet,
    Retry,
    VendorName,
    Width,
    choice_of,
    dispatcher_of,
    loras_of,
    print_json,
    settle_installing,
    verdict_words,
)


def emit_command(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command("emit", epilog="Example: sdkit-dispatch emit sample vae_decoder --out vae")(_emit)


def _emit(
    context: typer.Context,
    pipeline: Annotated[
        str, typer.Argument(help="An exported ONNX pipeline folder; 'sample' is the one inside.")
    ],
    component: Annotated[str, typer.Argument(help="text_encoder, unet, vae_decoder, ...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the program.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace a program that was written there before.")
    ] = False,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    width: Width = None,
    height: Height = None,
    batch: Batch = None,
    lora: Loras = None,
    install: Install = None,
    env: EnvChoice = None,
    check: Check = True,
    retry: Retry = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a component as a C++ program that needs ggml alone."""
    from .contract import record_to_json
    from .emit import VENDOR

    choice = choice_of(gpu, vendor or VENDOR, precision, profile, check=check, retry=retry)
    with dispatcher_of(context, install=install, env=env, is_quiet=quiet or as_json) as dispatcher:
        settle_installing(dispatcher, pipeline, choice)
        emitted = dispatcher.emit(
            pipeline,
            component,
            out,
            choice,
            width_px=width,
            height_px=height,
            batch=batch,
            may_replace=force,
            loras=loras_of(lora),
        )
    built = emitted.built
    if as_json:
        print_json(
            {
                "folder": str(emitted.folder),
                "files": list(emitted.files),
                "key": built.engine.key,
                "request": record_to_json(built.engine.request),
                "verdict": record_to_json(built.manifest.verdict),
            }
        )
        return
    print(
        f"{emitted.folder}: {component} in {built.manifest.request.precision} from engine "
        f"{built.engine.key[:12]} ({verdict_words(built.manifest.verdict)}), "
        f"{len(emitted.files)} files"
    )
    print(f"  cmake -S '{emitted.folder}' -B '{emitted.folder / 'build'}'")
    print(f"  cmake --build '{emitted.folder / 'build'}'")
    print("  README.md there says how to choose a GPU, and how to run it")
