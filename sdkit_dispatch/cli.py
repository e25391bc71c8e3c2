"""The command line: parse, call one function, print.

What a command needs is imported inside it, so that no command pays for another.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import cli_cleaning  # noqa: F401 - it adds its commands to the cache's
from .cli_bench import bench_app
from .cli_bundle import bundle_app
from .cli_cache import cache_app
from .cli_emit import emit_command
from .cli_native import vendors_build
from .cli_options import (
    Batch,
    Check,
    EnvChoice,
    Force,
    Gpu,
    Height,
    Install,
    Json,
    Loras,
    PipelinePath,
    PrecisionName,
    ProfileName,
    Quiet,
    RequireGpu,
    Retry,
    Strict,
    VendorName,
    Width,
    choice_of,
    dispatcher_of,
    duration_words,
    loras_of,
    print_json,
    print_loras,
    print_not_stored,
    print_steps,
    print_unchecked,
    settle_installing,
    verdict_words,
)
from .cli_vendors import vendors_app
from .version import __version__

if TYPE_CHECKING:
    from .doctor import Finding

app = typer.Typer(
    name="sdkit-dispatch",
    help="Compile Stable Diffusion for the hardware at hand, check it, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(vendors_app, name="vendors")
vendors_app.command("build", epilog="Example: sdkit-dispatch vendors build ggml --with vulkan")(
    vendors_build
)
app.add_typer(cache_app, name="cache")
app.add_typer(bundle_app, name="bundle")
app.add_typer(bench_app, name="bench")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"sdkit-dispatch {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    home: Annotated[
        Path | None, typer.Option("--home", help="Folder of engines and environments.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file of settings.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Compile Stable Diffusion for the hardware at hand, check it, and run it."""
    context.obj = {"home": home, "config": config, "verbose": verbose}
    import logging

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(levelname)s: %(message)s",
        stream=sys.stderr,
    )


@app.command(epilog="Example: sdkit-dispatch devices --json")
def devices(as_json: Json = False) -> None:
    """List the processors of this machine."""
    from .show_devices import show_devices

    show_devices(as_json=as_json)


@app.command(epilog="Example: sdkit-dispatch plan --json")
def plan(
    context: typer.Context,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    force: Force = False,
    install: Install = None,
    env: EnvChoice = None,
    as_json: Json = False,
) -> None:
    """Show which vendor would run where, and why the others would not."""
    with dispatcher_of(context, install=install, env=env, is_quiet=as_json) as dispatcher:
        choice = choice_of(gpu, vendor, precision, profile, force=force)
        report = dispatcher.plan_report(choice)
    if as_json:
        from .contract import record_to_json

        print_json(record_to_json(report))
        return
    decision = report.decision
    for index, entry in enumerate(decision.plans):
        state = "" if entry.state == "ready" else " (to be installed)"
        runtime = f" with {entry.runtime}" if entry.runtime else ""
        print(
            f"{index + 1}. {entry.vendor} on {entry.device.name}, {entry.precision}{runtime}{state}"
        )
        for reason in entry.reasons:
            print(f"     {reason}")
    for rejection in decision.rejections:
        where = f" on {rejection.device}" if rejection.device else ""
        print(f"-  {rejection.vendor}{where}: {rejection.reason} [{rejection.code}]")
        if rejection.hint:
            print(f"     -> {rejection.hint}")
    for advice in decision.advice:
        print(f"*  {advice}")
    for failure in report.failures:
        print(
            f"!  {failure.vendor} on {failure.device}: {failure.component} in {failure.precision} "
            f"failed ({failure.at[:16]} UTC): {failure.message.splitlines()[0]}"
        )
    if report.failures:
        print("     -> sdkit-dispatch build --retry tries again")
    for size in report.installs:
        if not size.is_installed and size.download_bytes and size.disk_bytes:
            print(
                f"*  {size.command}: about {size.download_bytes / 1e6:.0f} MB to download, "
                f"{size.disk_bytes / 1e6:.0f} MB on disk"
            )


@app.command(epilog="Example: sdkit-dispatch build sample --gpu auto")
def build(
    context: typer.Context,
    pipeline: PipelinePath = "sample",
    gpu: Gpu = "auto",
    archs: Annotated[
        str | None,
        typer.Option("--for", help="Build for devices elsewhere instead: sm_89,sm_120."),
    ] = None,
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
    force: Force = False,
    strict: Strict = False,
    require_gpu: RequireGpu = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show operations, copies and memory of each engine."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compile and check the engines of a pipeline."""
    from .cli_explain import explained, print_explained

    choice = choice_of(
        gpu,
        vendor,
        precision,
        profile,
        check=check,
        retry=retry,
        force=force,
        require_gpu=require_gpu,
    )
    with dispatcher_of(
        context, install=install, env=env, strict=strict, is_quiet=quiet or as_json
    ) as dispatcher:
        size = {"width_px": width, "height_px": height, "batch": batch}
        loras = loras_of(lora)
        if archs is None:
            settle_installing(dispatcher, pipeline, choice)
            results = [dispatcher.build(pipeline, choice, loras=loras, **size)]
        else:
            names = [name.strip() for name in archs.split(",") if name.strip()]
            results = dispatcher.build_for(names, pipeline, choice, loras=loras, **size)
    for result in results:
        print_loras(result.loras)
    if as_json:
        documents = [_build_json(result) for result in results]
        for document, result in zip(documents, results, strict=True):
            for row, built in zip(document["components"], result.components, strict=True):
                row |= {"explained": explained(built)} if explain else {}
        print_json({"build": documents[0]} if archs is None else {"builds": documents})
        return
    for result in results:
        _print_build(result)
        if explain:
            print_explained(result)


def _print_build(result: Any) -> None:  # Any: BuildResult, imported late
    print_steps(result.steps)
    print(f"{result.plan.vendor} on {result.plan.device.name} ({result.plan.runtime})")
    if result.checkpoint_sha256:
        print(
            f"  nothing to build: {result.plan.vendor} takes the checkpoint as it is; its header "
            f"is sound, sha256 {result.checkpoint_sha256[:12]}; no reference checks what it draws"
        )
    for built in result.components:
        how = "hit" if built.is_hit else "built"
        size_mb = built.manifest.size_bytes / 1e6
        print(
            f"  {built.component:<15} {how:<5} in {duration_words(built.elapsed_s)}, "
            f"{built.engine.key[:12]}, {size_mb:.1f} MB, {built.manifest.request.precision}, "
            f"{verdict_words(built.manifest.verdict)}"
        )
    if not result.is_stored:
        print_not_stored()


@app.command(epilog='Example: sdkit-dispatch generate "a red seven" --seed 1 --out seven.png')
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    pipeline: Annotated[
        str, typer.Option("--pipeline", "-p", help="Pipeline folder, checkpoint, or 'sample'.")
    ] = "sample",
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG file.")] = Path("image.png"),
    negative: Annotated[str, typer.Option("--negative", help="What not to draw.")] = "",
    width: Width = None,
    height: Height = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="CFG scale.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed and vendor, same image.")] = 0,
    batch: Batch = None,
    lora: Loras = None,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="euler, euler_a, ddim, dpmpp_2m, dpmpp_2m_karras or lcm."),
    ] = None,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    install: Install = None,
    env: EnvChoice = None,
    check: Check = True,
    retry: Retry = False,
    force: Force = False,
    strict: Strict = False,
    require_gpu: RequireGpu = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make an image."""
    from .loaded_pipeline import require_writable

    choice = choice_of(
        gpu,
        vendor,
        precision,
        profile,
        check=check,
        retry=retry,
        force=force,
        require_gpu=require_gpu,
    )
    require_writable(out)
    with dispatcher_of(
        context, install=install, env=env, strict=strict, is_quiet=quiet or as_json
    ) as dispatcher:
        settle_installing(dispatcher, pipeline, choice)
        answer = dispatcher.load(pipeline, choice, loras=loras_of(lora)).generate(
            prompt,
            negative_prompt=negative,
            width_px=width,
            height_px=height,
            steps=steps,
            guidance=guidance,
            seed=seed,
            batch=batch,
            scheduler=scheduler,
        )
    files = answer.save(out)
    print_loras(answer.loras)
    if as_json:
        print_json({"files": [str(file) for file in files], "result": answer.facts()})
        return
    print_steps(answer.steps)
    print_unchecked(answer)
    if not answer.is_stored:
        print_not_stored()
    ran = answer.denoiser
    print(
        f"{', '.join(str(file) for file in files)}: {answer.plan.vendor} on {ran['device']} "
        f"({ran['precision']}), {answer.timings['total']:.2f} s"
    )


@app.command(epilog="Example: sdkit-dispatch demo")
def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG file.")] = Path("demo.png"),
) -> None:
    """Build the sample pipeline and draw with it; installs nothing."""
    from .choice import Choice

    with dispatcher_of(context, install=False) as dispatcher:
        loaded = dispatcher.load("sample", Choice())
        answer = loaded.generate("a red seven", seed=1)
    answer.save(out)
    print_steps(answer.steps)
    print_unchecked(answer)
    for built in answer.components:
        how = "hit" if built.is_hit else "built"
        print(
            f"  {built.component:<15} {how:<5} in {duration_words(built.elapsed_s)}, "
            f"{verdict_words(built.manifest.verdict)}"
        )
    print(
        f"{out}: 'a red seven' by {answer.plan.vendor} on {answer.ran['unet']['device']} "
        f"in {answer.timings['total']:.2f} s, 32x32 pixels"
    )


@app.command(epilog="Example: sdkit-dispatch doctor --report report.txt")
def doctor(
    context: typer.Context,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a text file for a bug report.")
    ] = None,
    draw: Annotated[
        bool | None,
        typer.Option(
            "--draw/--no-draw", help="Also build the sample and draw; by default with --gpu."
        ),
    ] = None,
    env: EnvChoice = None,
    as_json: Json = False,
) -> None:
    """Compute something small with every installed vendor and compare."""
    from .bug_report import bug_report
    from .contract import record_to_json
    from .doctor import examine
    from .failures import Failures

    with dispatcher_of(context, install=False, env=env, is_quiet=as_json) as dispatcher:
        home = dispatcher.home
        failures = list(Failures(home).all())
        findings: list[Finding] = []
        try:
            is_drawing = gpu != "auto" if draw is None else draw
            findings = examine(
                dispatcher, gpu=gpu, vendor=vendor, pipeline="sample" if is_drawing else None
            )
        finally:  # a device that is not seen is what a report is most wanted for
            if report is not None:
                report.write_text(bug_report(dispatcher, findings), encoding="utf-8")
                print(f"wrote {report}: read it before you attach it", file=sys.stderr)
    is_healthy = all(finding.status != "failed" for finding in findings)
    if as_json:
        document = {
            "is_healthy": is_healthy,
            "home": str(home),
            "findings": [record_to_json(finding) for finding in findings],
            "failures": [record_to_json(failure) for failure in failures],
        }
        print_json(document)
    else:
        for finding in findings:
            print(f"{finding.status:<8} {finding.vendor} on {finding.device}: {finding.message}")
            for reason in finding.reasons:
                print(f"         {reason}")
            if finding.hint:
                print(f"         -> {finding.hint}")
        for failure in failures:
            print(
                f"before   {failure.vendor} on {failure.device}: {failure.component} failed "
                f"({failure.at[:16]}): {failure.message.splitlines()[0]}"
            )
        if not any(finding.status == "ok" for finding in findings):
            print("no vendor computed anything -> sdkit-dispatch vendors install auto")
        print(f"engines, environments and settings are in {home}")
    raise typer.Exit(0 if is_healthy else 1)


emit_command(app)  # here, so that help lists it after the commands that most people want


def _build_json(result: Any) -> dict[str, Any]:  # Any: BuildResult; JSON data
    from .contract import record_to_json

    return {
        "is_hit": result.is_hit,
        "is_stored": result.is_stored,
        "forecast": record_to_json(result.forecast),
        "evicted": [record_to_json(one) for one in result.evicted],
        "plan": record_to_json(result.plan),
        "steps": [record_to_json(step) for step in result.steps],
        "checkpoint_sha256": result.checkpoint_sha256,
        "loras": [record_to_json(one) for one in result.loras],
        "components": [
            {
                "component": built.component,
                "key": built.engine.key,
                "is_hit": built.is_hit,
                "is_stored": built.is_stored,
                "elapsed_s": round(built.elapsed_s, 4),
                "build_s": built.manifest.build_s,
                "size_bytes": built.manifest.size_bytes,
                "precision": built.manifest.request.precision,
                "verdict": record_to_json(built.manifest.verdict),
                "earlier": [record_to_json(one) for one in built.manifest.earlier],
                "facts": dict(built.manifest.facts),
                "damage": built.damage,
            }
            for built in result.components
        ],
    }
