"""The commands `sdkit-dispatch bundle ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import (
    Batch,
    EnvChoice,
    Height,
    Json,
    ProfileName,
    Quiet,
    VendorName,
    Width,
    dispatcher_of,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .api import Dispatcher
    from .bundle_file import Index
    from .cache import Entry
    from .contract import Shapes
    from .wanted import Wanted

bundle_app = typer.Typer(
    help="Move engines to another machine: one file, checked and signed.", no_args_is_help=True
)
BundleFile = Annotated[Path, typer.Argument(help="A bundle.")]
Trust = Annotated[
    list[str] | None,
    typer.Option("--trust", help="A public key, or its file: take only what that key signed."),
]


@bundle_app.command("export", epilog="Example: sdkit-dispatch bundle export sample --out s.sdkit")
def bundle_export(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(help="A pipeline folder, 'sample', or beginnings of keys of engines."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path(
        "engines.sdkit"
    ),
    vendor: VendorName = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Only engines for this target: sm_89.")
    ] = None,
    profile: ProfileName = None,
    width: Width = None,
    height: Height = None,
    batch: Batch = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference", help="Pack what a pipeline's engines are checked with."
        ),
    ] = True,
    sign: Annotated[
        str | None, typer.Option("--sign", help="File of a secret key: bundle keygen.")
    ] = None,
    env: EnvChoice = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Pack stored engines, with what another machine needs to check them, into one file."""
    from .bundle import export_bundle
    from .bundle_signature import SECRET, read_key

    secret = None if sign is None else read_key(sign, SECRET)
    words = what or ["sample"]
    references: dict[str, bytes] = {}
    missing = ""
    with dispatcher_of(context, install=False, env=env, is_quiet=quiet or as_json) as dispatcher:
        if len(words) == 1 and _is_pipeline(words[0]):
            want = _wanted(dispatcher, words[0], profile, width, height, batch)
            sizes = None if (width, height, batch) == (None, None, None) else want.shapes
            entries = _engines_of(dispatcher, want, sizes, vendor=vendor, target=target)
            if reference:
                references, missing = _references(dispatcher, want)
        else:
            entries = [_the_one(dispatcher, prefix) for prefix in dict.fromkeys(words)]
            missing = "engines that are named by their keys travel without a recording"
        result = export_bundle(
            out,
            list({entry.key: entry for entry in entries}.values()),
            store=dispatcher.store,
            references=references,
            secret=secret,
            report=dispatcher.report,
        )
    if as_json:
        print_json(
            {
                "file": result.path,
                "size_bytes": result.size_bytes,
                "signer": result.signer,
                "engines": _rows(result.index),
                "references": len(references),
            }
        )
        return
    _print_engines(result.index)
    if missing:
        print(f"! no reference is in it: {missing}", file=sys.stderr)
    signed = f"signed by {result.signer}" if result.signer else "unsigned"
    print(f"{result.path}: {len(result.index.engines)} engines, {_mb(result.size_bytes)}, {signed}")


@bundle_app.command("import", epilog="Example: sdkit-dispatch bundle import engines.sdkit")
def bundle_import(
    context: typer.Context,
    file: BundleFile,
    trust: Trust = None,
    require_signature: Annotated[
        bool,
        typer.Option("--require-signature", help="Take only what a signer trusted here signed."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also take engines for another device or version.")
    ] = False,
    env: EnvChoice = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Verify a bundle and put its engines into the store; the first load here checks them."""
    from functools import partial

    from .bundle import import_bundle
    from .bundle_fit import fit_here
    from .bundle_signature import trusted_keys

    with dispatcher_of(context, install=False, env=env, is_quiet=quiet or as_json) as dispatcher:
        result = import_bundle(
            file,
            store=dispatcher.store,
            fit=partial(
                fit_here,
                specs=dispatcher.specs,
                devices=dispatcher.devices,
                workers=dispatcher.workers,
            ),
            trusted=trusted_keys(dispatcher.home, trust or ()),
            must_be_trusted=bool(trust) or require_signature,
            may_misfit=force,
            report=dispatcher.report,
        )
    if as_json:
        from .contract import record_to_json

        print_json(record_to_json(result))
        return
    for one in result.engines:
        print(
            f"{one.key[:12]}  {one.request.vendor:<10} {one.request.component:<15} "
            f"{one.state:<5} {_mb(one.size_bytes)}"
        )
        if one.message:
            print(f"! {one.key[:12]}: {one.message}", file=sys.stderr)
    print(f"{len(result.engines)} engines, {result.references} recordings, {result.signer.words}")


@bundle_app.command("show", epilog="Example: sdkit-dispatch bundle show engines.sdkit")
def bundle_show(
    context: typer.Context,
    file: BundleFile,
    trust: Trust = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Verify a bundle and list what is in it; nothing is taken out."""
    from .bundle import verify_bundle
    from .bundle_signature import trusted_keys

    with dispatcher_of(context, install=False, is_quiet=quiet or as_json) as dispatcher:
        trusted = trusted_keys(dispatcher.home, trust or ())
        index, signer = verify_bundle(file, trusted=trusted, report=dispatcher.report)
    if as_json:
        from .contract import record_to_json

        print_json(
            {
                "tool": index.tool,
                "signer": record_to_json(signer),
                "engines": _rows(index),
                "references": sorted(index.references),
            }
        )
        return
    _print_engines(index)
    print(f"{len(index.engines)} engines, {len(index.references)} recordings, {signer.words}")
    print(f"made by {index.tool}; every file is as its index says")


@bundle_app.command("keygen", epilog="Example: sdkit-dispatch bundle keygen --out signing.key")
def bundle_keygen(
    out: Annotated[Path, typer.Option("--out", "-o", help="File of the secret key.")],
    as_json: Json = False,
) -> None:
    """Make a key to sign bundles with: FILE is secret, FILE.pub is for everybody."""
    from .bundle_signature import write_keys

    public = write_keys(out)
    if as_json:
        print_json({"secret_file": str(out), "public_file": f"{out}.pub", "public_key": public})
        return
    print(f"{out}: secret; {out}.pub: for those who import")
    print(public)


def _is_pipeline(word: str) -> bool:
    from .choice import SAMPLE

    # A folder may be called "ab12"; beginnings of keys hold nothing but such letters.
    looks_like_key = not set(word) - set("0123456789abcdef")
    return word == SAMPLE or not looks_like_key or os.path.isdir(os.path.expanduser(word))


def _wanted(
    dispatcher: Dispatcher,
    pipeline: str,
    profile: str | None,
    width: int | None,
    height: int | None,
    batch: int | None,
) -> Wanted:
    from .choice import Choice, sample_choice
    from .wanted import wanted

    choice = sample_choice(pipeline, Choice(profile=profile))
    read = dispatcher.read(pipeline)
    request = dispatcher.request(
        read, choice, prompt="", width_px=width, height_px=height, batch=batch
    )
    return wanted(read, request, token_chunks=1, memo=dispatcher.store.memo)


def _engines_of(
    dispatcher: Dispatcher,
    want: Wanted,
    sizes: Mapping[str, Shapes] | None,
    *,
    vendor: str | None,
    target: str | None,
) -> list[Entry]:
    """Returns the stored engines of a pipeline, of every vendor and target.

    Args:
        dispatcher: Has the store.
        want: The pipeline.
        sizes: Component -> shapes; None for engines of any size.
        vendor: Only engines of this one.
        target: Only engines for this one.

    Raises:
        ConfigError: There is none of one component.
    """
    from .errors import ConfigError
    from .graph.size_ranges import does_serve

    found: dict[str, Entry] = {}
    there: set[str] = set()
    for entry in dispatcher.store.entries():
        if entry.manifest is None or entry.damage:
            continue
        request = entry.manifest.request
        name = request.component
        if (
            want.digests.get(name) == (request.graph_digest, request.weights_digest)
            and (sizes is None or does_serve(request, sizes[name]))
            and vendor in (None, request.vendor)
            and target in (None, request.target)
        ):
            found[entry.key] = entry
            there.add(name)
    if missing := [name for name in want.shapes if name not in there]:
        folder = want.pipeline.folder
        raise ConfigError(
            f"no engine of {', '.join(missing)} is stored for '{folder}' as it is asked for",
            "sdkit-dispatch build, or sdkit-dispatch cache list",
        )
    return list(found.values())


def _references(dispatcher: Dispatcher, want: Wanted) -> tuple[dict[str, bytes], str]:
    """Returns the recording of a pipeline at this size, or why there is none."""
    from .check import recorded_request, recording_bytes
    from .choice import Choice
    from .reference import portable_name

    reference = dispatcher.builder(Choice()).tools.reference
    recording = reference.recording(
        want.pipeline,
        want.request,
        shapes=want.shapes,
        digests=want.digests,
        token_chunks=want.token_chunks,
        report=dispatcher.report,
    )
    if recording is None:
        return {}, reference.missing
    recorded = recorded_request(want.request)
    name = portable_name(want.pipeline, recorded, want.digests, token_chunks=want.token_chunks)
    return {name: recording_bytes(recording)}, ""


def _the_one(dispatcher: Dispatcher, prefix: str) -> Entry:
    from .errors import ConfigError

    found = dispatcher.store.find(prefix)
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} stored engines have a key that starts with '{prefix}'",
            "sdkit-dispatch cache list",
        )
    return found[0]


def _rows(index: Index) -> list[dict[str, Any]]:  # Any: JSON data
    from .contract import record_to_json

    return [
        {
            "key": key,
            "size_bytes": manifest.size_bytes,
            "verdict": manifest.verdict.status,
            "request": record_to_json(manifest.request),
            "tool": manifest.tool,
            "created_at": manifest.created_at,
        }
        for key, manifest in sorted(index.engines.items())
    ]


def _print_engines(index: Index) -> None:
    for key, manifest in sorted(index.engines.items()):
        request = manifest.request
        print(
            f"{key[:12]}  {request.vendor:<10} {request.component:<15} {request.precision:<5} "
            f"{_mb(manifest.size_bytes):>11}  {request.target or 'any device'}, {request.runtime}, "
            f"{manifest.verdict.status} there"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
