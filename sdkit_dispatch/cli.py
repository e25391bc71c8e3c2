"""The command line: parse, call one function, print.

What a command needs is imported inside it, so that `--help` and `devices` stay fast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .show_devices import SCHEMA_VERSION
from .version import __version__

if TYPE_CHECKING:
    from .api import Choice, Dispatcher
    from .progress import ProgressView

app = typer.Typer(
    name="sdkit-dispatch",
    help="Compile Stable Diffusion for the hardware at hand, check it, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
vendors_app = typer.Typer(
    help="List, install and remove vendor environments.", no_args_is_help=True
)
cache_app = typer.Typer(
    help="List, explain, verify and remove stored engines.", no_args_is_help=True
)
app.add_typer(vendors_app, name="vendors")
app.add_typer(cache_app, name="cache")

Json = Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version.")]
Gpu = Annotated[
    str, typer.Option("--gpu", help="auto, cpu, gpu:N, a device id or a part of a device's name.")
]
VendorName = Annotated[str | None, typer.Option("--vendor", help="Use only this vendor.")]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", help="fp32, fp16, ...; the vendor's best by default.")
]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="Name of a profile, or a YAML file.")
]
PipelinePath = Annotated[
    str, typer.Argument(help="An exported ONNX pipeline folder; 'sample' is the one inside.")
]
Width = Annotated[int | None, typer.Option("--width", help="In pixels.")]
Height = Annotated[int | None, typer.Option("--height", help="In pixels.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Images at once.")]
Install = Annotated[
    bool | None,
    typer.Option(
        "--install/--no-install", help="Install a missing vendor, or never; asks by default."
    ),
]
EnvChoice = Annotated[
    str | None,
    typer.Option("--env", help="Where vendors run: auto, managed, current, or a path."),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Compare engines with the reference.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Try again what failed here before.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail instead of taking another device or vendor.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


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
    install: Install = None,
    env: EnvChoice = None,
    as_json: Json = False,
) -> None:
    """Show which vendor would run where, and why the others would not."""
    with _dispatcher(context, install=install, env=env, is_quiet=as_json) as dispatcher:
        report = dispatcher.plan_report(_choice(gpu, vendor, precision, profile))
    if as_json:
        from .contract import record_to_json

        _print_json(record_to_json(report))
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
    vendor: VendorName = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    width: Width = None,
    height: Height = None,
    batch: Batch = None,
    install: Install = None,
    env: EnvChoice = None,
    check: Check = True,
    retry: Retry = False,
    strict: Strict = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compile and check the engines of a pipeline."""
    choice = _choice(gpu, vendor, precision, profile, check=check, retry=retry)
    with _dispatcher(
        context, install=install, env=env, strict=strict, is_quiet=quiet or as_json
    ) as dispatcher:
        _settle_installing(dispatcher, choice)
        result = dispatcher.build(pipeline, choice, width_px=width, height_px=height, batch=batch)
    if as_json:
        _print_json({"build": _build_json(result)})
        return
    _print_steps(result.steps)
    print(f"{result.plan.vendor} on {result.plan.device.name} ({result.plan.runtime})")
    for built in result.components:
        how = "hit" if built.is_hit else "built"
        size_mb = built.manifest.size_bytes / 1e6
        print(
            f"  {built.component:<15} {how:<5} in {_duration(built.elapsed_s)}, "
            f"{built.engine.key[:12]}, {size_mb:.1f} MB, {built.manifest.request.precision}, "
            f"{_verdict(built.manifest.verdict)}"
        )


@app.command(epilog='Example: sdkit-dispatch generate "a red seven" --seed 1 --out seven.png')
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    pipeline: Annotated[
        str, typer.Option("--pipeline", "-p", help="Pipeline folder, or 'sample'.")
    ] = "sample",
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG file.")] = Path("image.png"),
    negative: Annotated[str, typer.Option("--negative", help="What not to draw.")] = "",
    width: Width = None,
    height: Height = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="CFG scale.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same image.")] = 0,
    batch: Batch = None,
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
    strict: Strict = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make an image."""
    choice = _choice(gpu, vendor, precision, profile, check=check, retry=retry)
    with _dispatcher(
        context, install=install, env=env, strict=strict, is_quiet=quiet or as_json
    ) as dispatcher:
        _settle_installing(dispatcher, choice)
        answer = dispatcher.load(pipeline, choice).generate(
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
    if as_json:
        _print_json({"files": [str(file) for file in files], "result": answer.facts()})
        return
    _print_steps(answer.steps)
    ran = answer.ran["unet"]
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
    from .api import Choice

    with _dispatcher(context, install=False) as dispatcher:
        loaded = dispatcher.load("sample", Choice())
        answer = loaded.generate("a red seven", seed=1)
    answer.save(out)
    _print_steps(answer.steps)
    for built in answer.components:
        how = "hit" if built.is_hit else "built and checked"
        print(f"  {built.component:<15} {how} in {_duration(built.elapsed_s)}")
    print(
        f"{out}: 'a red seven' by {answer.plan.vendor} on {answer.ran['unet']['device']} "
        f"in {answer.timings['total']:.2f} s"
    )


@app.command(epilog="Example: sdkit-dispatch bench --quick")
def bench(
    context: typer.Context,
    pipeline: PipelinePath = "sample",
    quick: Annotated[
        bool, typer.Option("--quick", help="Our UNet step against the bare runtime's.")
    ] = True,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    profile: ProfileName = None,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Interleaved rounds.")] = 15,
    as_json: Json = False,
) -> None:
    """Measure vendors against their bare runtimes."""
    from .benchmark import quick_benchmark
    from .contract import record_to_json

    with _dispatcher(context, install=False, is_quiet=as_json) as dispatcher:
        rows = quick_benchmark(
            dispatcher, pipeline, _choice(gpu, vendor, None, profile), rounds=rounds
        )
    if as_json:
        _print_json({"rows": [record_to_json(row) for row in rows]})
        return
    print("the UNet step of our denoising loop against the bare runtime, interleaved in one run")
    print(f"{'vendor':<12}{'ours':>12}{'bare':>12}{'ratio':>8}   quartiles of {rounds} rounds")
    for row in rows:
        if row.failure:
            print(f"{row.vendor:<12}{row.failure}")
        else:
            print(
                f"{row.vendor:<12}{row.ours_ms:>9.2f} ms{row.bare_ms:>9.2f} ms{row.ratio:>8.3f}"
                f"   {row.low:.3f} .. {row.high:.3f}"
            )


@app.command(epilog="Example: sdkit-dispatch doctor --report report.txt")
def doctor(
    context: typer.Context,
    gpu: Gpu = "auto",
    vendor: VendorName = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a text file for a bug report.")
    ] = None,
    env: EnvChoice = None,
    as_json: Json = False,
) -> None:
    """Compute something small with every installed vendor and compare."""
    from .bug_report import bug_report
    from .contract import record_to_json
    from .doctor import examine
    from .failures import Failures

    with _dispatcher(context, install=False, env=env, is_quiet=as_json) as dispatcher:
        findings = examine(dispatcher, gpu=gpu, vendor=vendor)
        failures = list(Failures(dispatcher.home).all())
        if report is not None:
            report.write_text(bug_report(dispatcher, findings), encoding="utf-8")
    is_healthy = all(finding.status != "failed" for finding in findings)
    if as_json:
        document = {
            "is_healthy": is_healthy,
            "findings": [record_to_json(finding) for finding in findings],
            "failures": [record_to_json(failure) for failure in failures],
        }
        _print_json(document)
    else:
        for finding in findings:
            print(f"{finding.status:<8} {finding.vendor} on {finding.device}: {finding.message}")
            if finding.hint:
                print(f"         -> {finding.hint}")
        for failure in failures:
            print(
                f"before   {failure.vendor} on {failure.device}: {failure.component} failed "
                f"({failure.at[:16]}): {failure.message.splitlines()[0]}"
            )
        if not any(finding.status == "ok" for finding in findings):
            print("no vendor computed anything -> sdkit-dispatch vendors install auto")
    if report is not None:
        print(f"wrote {report}: read it before you attach it", file=sys.stderr)
    raise typer.Exit(0 if is_healthy else 1)


@vendors_app.command("list", epilog="Example: sdkit-dispatch vendors list --json")
def vendors_list(context: typer.Context, as_json: Json = False) -> None:
    """Show every vendor's state."""
    from .contract import record_to_json
    from .env import state

    with _dispatcher(context) as dispatcher:
        states = [state(spec, home=dispatcher.home) for spec in dispatcher.specs.values()]
    if as_json:
        _print_json({"vendors": [record_to_json(one) for one in states]})
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
    reinstall: Annotated[
        bool, typer.Option("--reinstall", help="Make it even if there is a good one.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make a vendor's environment; says first what it downloads and how big that is."""
    from .env import install, plan_install

    with _dispatcher(context, is_quiet=quiet) as dispatcher:
        spec = _spec(dispatcher, name)
        plan = plan_install(spec, home=dispatcher.home, source=source, report=dispatcher.report)
        print(plan.summary, flush=True)
        if not yes and sys.stdin.isatty() and not _ask("Install now?"):
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
    quiet: Quiet = False,
) -> None:
    """Fetch a vendor's packages, for 'vendors install --from' on a machine without internet."""
    from .env import download

    with _dispatcher(context, is_quiet=quiet) as dispatcher:
        spec = _spec(dispatcher, name)
        download(spec, to=to, report=dispatcher.report)
    print(f"on the other machine: sdkit-dispatch vendors install {spec.name} --from {to}")


@vendors_app.command("remove", epilog="Example: sdkit-dispatch vendors remove openvino")
def vendors_remove(
    context: typer.Context, name: Annotated[str, typer.Argument(help="A vendor.")]
) -> None:
    """Remove a vendor's environment."""
    from .env import remove

    with _dispatcher(context) as dispatcher:
        spec = _spec(dispatcher, name)
        removed = remove(spec, home=dispatcher.home)
    print(f"{spec.name}: {'removed' if removed else 'there was no environment'}")


@cache_app.command("list", epilog="Example: sdkit-dispatch cache list")
def cache_list(context: typer.Context, as_json: Json = False) -> None:
    """List the stored engines."""
    from .contract import record_to_json

    with _dispatcher(context) as dispatcher:
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
        _print_json({"engines": rows})
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
            f"{manifest.created_at[:16]}  {_verdict(manifest.verdict)}"
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
    as_json: Json = False,
) -> None:
    """Say for each component whether its engine is stored, and what differs if it is not."""
    choice = _choice(gpu, vendor, precision, profile)
    with _dispatcher(context, install=False) as dispatcher:
        rows = dispatcher.explain(pipeline, choice, width_px=width, height_px=height, batch=batch)
    if as_json:
        from .contract import record_to_json

        _print_json({"components": [record_to_json(row) for row in rows]})
        return
    for row in rows:
        print(f"{row.component:<15} {row.status:<6} {row.key[:12]}  {row.message}")
        for difference in row.differences:
            print(f"    {difference.field}: {difference.stored} -> {difference.wanted}")


@cache_app.command("verify", epilog="Example: sdkit-dispatch cache verify")
def cache_verify(context: typer.Context, as_json: Json = False) -> None:
    """Hash every stored file."""
    with _dispatcher(context) as dispatcher:
        store = dispatcher.store
        swept = store.sweep()
        results = {entry.key: store.verify(entry) for entry in store.entries()}
    damaged = {key: damage for key, damage in results.items() if damage}
    if as_json:
        _print_json({"verified": len(results), "damaged": damaged, "swept": swept})
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

    with _dispatcher(context) as dispatcher:
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


# --- what several commands share


def _dispatcher(
    context: typer.Context,
    *,
    install: bool | None = None,
    env: str | None = None,
    strict: bool = False,
    is_quiet: bool = False,
) -> _Running:
    return _Running(context, install=install, env=env, strict=strict, is_quiet=is_quiet)


class _Running:
    """A dispatcher with its progress view; both end with the command."""

    def __init__(
        self,
        context: typer.Context,
        *,
        install: bool | None,
        env: str | None,
        strict: bool,
        is_quiet: bool,
    ) -> None:
        from .api import Dispatcher
        from .config import home_folder, load_config
        from .progress import ProgressView

        settings = context.find_root().obj
        home = settings["home"] or home_folder()
        flags = {
            "may_install": None if install is None else ("yes" if install else "no"),
            "env": env,
            "strict": True if strict else None,
        }
        config = load_config(settings["config"], home=home, flags=flags)
        self.view: ProgressView = ProgressView(is_quiet=is_quiet)
        self.dispatcher: Dispatcher = Dispatcher(home=home, config=config, report=self.view)

    def __enter__(self) -> Dispatcher:
        self.view.__enter__()
        return self.dispatcher

    def __exit__(self, *details: Any) -> None:  # Any: exception type, value and traceback
        self.view.__exit__(*details)
        self.dispatcher.close()


def _choice(
    gpu: str,
    vendor: str | None,
    precision: str | None,
    profile: str | None,
    *,
    check: bool = True,
    retry: bool = False,
) -> Choice:
    from typing import get_args

    from .api import Choice
    from .contract import Precision
    from .errors import ConfigError

    if precision is not None and precision not in get_args(Precision):
        raise ConfigError(
            f"--precision is '{precision}'; it may be {', '.join(get_args(Precision))}"
        )
    return Choice(
        gpu=gpu,
        vendor=vendor,
        precision=precision,  # type: ignore[arg-type]  # it was compared with the literals
        profile=profile,
        must_check=check,
        may_retry=retry,
    )


def _settle_installing(dispatcher: Dispatcher, choice: Choice) -> None:
    """Asks on a terminal whether the best vendor may be installed; elsewhere it may not."""
    if dispatcher.config.may_install == "ask":
        dispatcher.settle_installing(choice, ask=_ask if sys.stdin.isatty() else None)


def _ask(question: str) -> bool:
    return typer.confirm(question, err=True)


def _spec(dispatcher: Dispatcher, name: str) -> Any:  # Any: VendorSpec, imported late
    from .errors import ConfigError

    if name == "auto":
        return dispatcher.best_installable()
    if name not in dispatcher.specs:
        raise ConfigError(
            f"there is no vendor '{name}'; there are {', '.join(dispatcher.specs)}",
            "sdkit-dispatch vendors list",
        )
    return dispatcher.specs[name]


def _build_json(result: Any) -> dict[str, Any]:  # Any: BuildResult; JSON data
    from .contract import record_to_json

    return {
        "is_hit": result.is_hit,
        "plan": record_to_json(result.plan),
        "steps": [record_to_json(step) for step in result.steps],
        "components": [
            {
                "component": built.component,
                "key": built.engine.key,
                "is_hit": built.is_hit,
                "elapsed_s": round(built.elapsed_s, 4),
                "build_s": built.manifest.build_s,
                "size_bytes": built.manifest.size_bytes,
                "precision": built.manifest.request.precision,
                "verdict": record_to_json(built.manifest.verdict),
                "facts": dict(built.manifest.facts),
                "damage": built.damage,
            }
            for built in result.components
        ],
    }


def _print_steps(steps: Any) -> None:  # Any: tuple of Step
    for step in steps:
        print(f"! {step.vendor} on {step.device} did not serve: {step.reason}", file=sys.stderr)


def _verdict(verdict: Any) -> str:  # Any: Verdict
    if verdict.status != "passed":
        return f"{verdict.status}: {verdict.reason}" if verdict.reason else str(verdict.status)
    worst = max((entry["relative_max"] for entry in verdict.metrics.values()), default=0.0)
    return f"checked, error {worst:.1e}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _print_json(document: dict[str, Any]) -> None:  # Any: JSON data
    document = {"schema_version": SCHEMA_VERSION, **document}
    print(json.dumps(document, indent=2, allow_nan=False))
