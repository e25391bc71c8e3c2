"""The commands `sdkit-dispatch bench ...`: `run` is what `bench` alone means."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from .cli_options import (
    DryRun,
    Gpu,
    Install,
    Json,
    PrecisionName,
    ProfileName,
    Quiet,
    ask,
    choice_of,
    dispatcher_of,
    print_json,
)

if TYPE_CHECKING:
    from .api import Dispatcher
    from .benchmark.records import Report
    from .benchmark.suites import Suite
    from .choice import Choice

RUN = "run"


class _RunByDefault(typer.core.TyperGroup):
    """`bench sample --rounds 9` means `bench run sample --rounds 9`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer's own click
        # The help of the group is asked for with "bench --help"; it is in the rendered help, too.
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=_RunByDefault,
    help="Measure vendors, their bare runtimes and peers side by side.",
    epilog="`bench` alone is `bench run`: see `sdkit-dispatch bench run --help`.",
)


@bench_app.command(RUN, epilog="Example: sdkit-dispatch bench run sample --html bench.html")
def bench_run(
    context: typer.Context,
    pipeline: Annotated[
        str | None,
        typer.Argument(help="An exported ONNX pipeline folder; 'sample' is the one inside."),
    ] = None,
    vendors: Annotated[str, typer.Option("--vendors", help="all, or names: cpu,openvino.")] = "all",
    peers: Annotated[
        str, typer.Option("--peers", help="Other people's runtimes: all, or names.")
    ] = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Of the same network, for stable-diffusion.cpp."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", help="Fixed values, to compare: sample, sd15, sdxl.")
    ] = None,
    gpu: Gpu = "auto",
    vendor: Annotated[str | None, typer.Option("--vendor", hidden=True)] = None,
    precision: PrecisionName = None,
    profile: ProfileName = None,
    sizes: Annotated[str, typer.Option("--sizes", help="In pixels: 512,768x512.")] = "",
    batches: Annotated[str, typer.Option("--batch", help="Images at once: 1,2,4.")] = "",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Denoising steps.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Interleaved rounds.")] = 15,
    image_rounds: Annotated[
        int | None,
        typer.Option("--image-rounds", min=0, help="Of whole images; 0: components only."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of every session; configured otherwise.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one file to look at and to post.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a table.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", help="Write what `bench compare` reads.")
    ] = None,
    submit_file: Annotated[
        Path | None,
        typer.Option("--submit-file", help="Write JSON without user names, host names and paths."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Let `plan` prefer what was fastest here.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="With --apply: forget what was measured.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Our UNet step against the bare runtime's, no more.")
    ] = False,
    install: Install = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure vendors, their bare runtimes and peers in turns."""
    from .benchmark.leftovers import benchmark_files_in_use
    from .benchmark.run import Benchmark, Options, parse_names, parse_numbers, parse_sizes
    from .benchmark.suites import suite_named
    from .errors import ConfigError

    chosen = suite_named(suite) if suite else None
    files = [file for file in (html, csv, json_file, submit_file) if file is not None]
    for file in files:
        _require_place(file)
    if html is not None:
        from .benchmark.page import require_libraries

        require_libraries()
    if vendor is not None:
        vendors = vendor
    # What failed here before may work today: a benchmark finds out.
    choice = choice_of(gpu, None, precision, profile, retry=True)
    is_quiet = quiet or as_json
    with (
        dispatcher_of(context, install=install, is_quiet=is_quiet, threads=threads) as dispatcher,
        benchmark_files_in_use(dispatcher.home),
    ):
        if apply and forget:
            from .measured_order import forget_order

            print("forgotten" if forget_order(dispatcher.home) else "nothing was stored")
            return
        options = Options(
            vendors=parse_names(vendors),
            peers=parse_names(peers),
            suite=chosen,
            sizes=parse_sizes(sizes),
            batches=parse_numbers(batches, flag="--batch"),
            steps=steps,
            rounds=rounds,
            image_rounds=image_rounds,
            checkpoint=checkpoint,
            command=shlex.join(["sdkit-dispatch", *sys.argv[1:]]),
        )
        if not options.vendors:
            raise ConfigError("--vendors names none", "--vendors all")
        is_own = pipeline is None
        pipeline = pipeline or _default_pipeline(dispatcher, chosen)
        if quick:
            named = choice_of(gpu, vendor, None, profile)
            _quick(dispatcher, pipeline, named, rounds=rounds, as_json=as_json)
            return
        from .choice import sample_choice

        choice = sample_choice(pipeline, choice)
        _install_peers(dispatcher, options.peers)
        if is_own and checkpoint is None:
            own = _own_checkpoint(dispatcher, chosen, options.peers)
            options = replace(options, checkpoint=own)
        report = Benchmark(
            dispatcher=dispatcher,
            pipeline=dispatcher.read(pipeline),
            choice=choice,
            options=options,
        ).run()
        _write(report, dispatcher.home, html=html, csv=csv, json_file=json_file, submit=submit_file)
        if apply and not report.interrupted:
            from .benchmark.apply import order_from_report
            from .measured_order import save_order

            save_order(dispatcher.home, order_from_report(report))
    if as_json:
        from .benchmark.records import report_to_json

        print_json(report_to_json(report))
    else:
        from .benchmark.text import print_report

        print_report(report)
        for file in files:
            print(f"wrote {file}")
        if apply and not report.interrupted:
            print("`plan` now prefers what was fastest here; undo with: bench --apply --forget")
    if report.interrupted:
        raise typer.Exit(130)


@bench_app.command("compare", epilog="Example: sdkit-dispatch bench compare mine.json yours.json")
def bench_compare(
    one: Annotated[Path, typer.Argument(help="A report of `bench --json` or --json-file.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare two reports: what differs between the machines first, then ratios."""
    from .benchmark.compare import compare_reports, read_report

    comparison = compare_reports(read_report(one), read_report(other))
    if as_json:
        from .contract import record_to_json

        print_json(record_to_json(comparison))
        return
    for difference in comparison.differences:
        print(f"* {difference}")
    print(f"A = {one}, B = {other}; A/B below 1: A is faster")
    print(f"{'entrant':<24}{'what':<18}{'A':>12}{'B':>12}{'A/B':>8}   interval")
    for line in comparison.lines:
        print(
            f"{line.name:<24}{line.what:<18}{line.a_ms:>9.2f} ms{line.b_ms:>9.2f} ms"
            f"{line.ratio.median:>8.3f}   {line.ratio.low:.3f} .. {line.ratio.high:.3f}  "
            f"{line.ratio.call}"
        )
    for name in comparison.only_a:
        print(f"only in A: {name}")
    for name in comparison.only_b:
        print(f"only in B: {name}")


@bench_app.command("clean", epilog="Example: sdkit-dispatch bench clean --dry-run")
def bench_clean(
    context: typer.Context,
    environments: Annotated[
        bool, typer.Option("--environments", help="The peers' environments too.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove seeded pipelines and what peers made; engines stay, for `cache prune`."""
    from .benchmark.leftovers import leftovers, remove_leftovers
    from .contract import record_to_json

    with dispatcher_of(context, install=False, is_quiet=as_json) as dispatcher:
        rows = leftovers(dispatcher.home, environments=environments)
        if not dry_run:
            rows = remove_leftovers(dispatcher.home, rows, report=dispatcher.report)
    freed_bytes = sum(row.size_bytes for row in rows if not row.kept)
    if as_json:
        document = [record_to_json(row) for row in rows]
        print_json({"dry_run": dry_run, "files": document, "freed_bytes": freed_bytes})
    else:
        for row in rows:
            kept = f"; it stays: {row.kept}" if row.kept else ""
            print(f"{row.size_bytes / 1e6:12.1f} MB  {row.what:<12} {row.name}{kept}")
        verb = "would be freed" if dry_run else "freed"
        print(f"{freed_bytes / 1e6:12.1f} MB  {verb}")
    raise typer.Exit(4 if any(row.kept for row in rows) else 0)


def _default_pipeline(dispatcher: Dispatcher, suite: Suite | None) -> str:
    """Returns the pipeline of who names none; of a suite of full size it is filled first."""
    if suite is None or suite.pipeline:
        return suite.pipeline if suite else "sample"
    from .benchmark.seeded_pipeline import is_filled, seeded_bytes, seeded_pipeline

    if not is_filled(suite.name, suite.family, home=dispatcher.home):
        size_gb = seeded_bytes(suite.name, suite.family) / 1e9
        print(
            f"the suite '{suite.name}' draws with {size_gb:.1f} GB of seeded weights of its own, "
            f"which are written once into {dispatcher.home / 'suites'}",
            file=sys.stderr,
        )
    return str(
        seeded_pipeline(suite.name, suite.family, home=dispatcher.home, report=dispatcher.report)
    )


def _own_checkpoint(
    dispatcher: Dispatcher, suite: Suite | None, peers: tuple[str, ...]
) -> Path | None:
    """Returns the checkpoint of a suite that has its own pipeline, for peers that take one."""
    from .benchmark.peers import takes_checkpoint
    from .benchmark.seeded_checkpoint import (
        checkpoint_bytes,
        checkpoint_place,
        has_checkpoint,
        seeded_checkpoint,
    )

    if suite is None or not takes_checkpoint(dispatcher, peers) or not has_checkpoint(suite.name):
        return None
    place = checkpoint_place(suite.name, dispatcher.home)
    if not place.is_file():
        size_gb = checkpoint_bytes(suite.name) / 1e9
        told = f"{size_gb:.1f} GB more are written once, into '{place}'"
        print(f"stable-diffusion.cpp takes a checkpoint: {told}", file=sys.stderr)
    return seeded_checkpoint(suite.name, home=dispatcher.home, report=dispatcher.report)


def _require_place(file: Path) -> None:
    """Refuses a file that could not be written, before anything is measured for it."""
    from .errors import ConfigError

    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"'{file}' cannot be written: it is a folder, or its folder is missing")


def _install_peers(dispatcher: Dispatcher, names: tuple[str, ...]) -> None:
    """Makes the environments of peers, if the user lets us; says the sizes first."""
    if not names or dispatcher.config.may_install == "no":
        return
    from .benchmark.peers import install_peers, peer_install_summaries

    if dispatcher.config.may_install == "ask":
        if sys.stdin is None or not sys.stdin.isatty():
            return
        summaries = peer_install_summaries(dispatcher, names)
        if not summaries or not ask("\n".join([*summaries, "Install these peers now?"])):
            return
    install_peers(dispatcher, names)


def _write(
    report: Report,
    home: Path,
    *,
    html: Path | None,
    csv: Path | None,
    json_file: Path | None,
    submit: Path | None,
) -> None:
    import json

    from .benchmark.export import csv_text, submission
    from .benchmark.records import report_to_json

    texts: list[tuple[Path, str]] = []
    if json_file is not None:
        texts.append((json_file, json.dumps(report_to_json(report), indent=1) + "\n"))
    if csv is not None:
        texts.append((csv, csv_text(report)))
    if submit is not None:
        texts.append((submit, submission(report, home)))
    if html is not None:
        from .benchmark.page import page

        texts.append((html, page(report)))
    for file, text in texts:
        file.write_text(text, encoding="utf-8")


def _quick(
    dispatcher: Dispatcher, pipeline: str, choice: Choice, *, rounds: int, as_json: bool
) -> None:
    from .benchmark import quick_benchmark
    from .contract import record_to_json

    rows = quick_benchmark(dispatcher, pipeline, choice, rounds=rounds)
    if as_json:
        print_json({"rows": [record_to_json(row) for row in rows]})
        return
    print("the UNet step of our denoising loop against the bare runtime, interleaved in one run;")
    print("ours/bare is the median of the rounds' own ratios: below 1, ours is faster")
    print(f"{'vendor':<12}{'ours':>12}{'bare':>12}{'ours/bare':>11}   quartiles of {rounds} rounds")
    for row in rows:
        if row.failure:
            print(f"{row.vendor:<12}{row.failure}")
        else:
            print(
                f"{row.vendor:<12}{row.ours_ms:>9.2f} ms{row.bare_ms:>9.2f} ms{row.ratio:>11.3f}"
                f"   {row.low:.3f} .. {row.high:.3f}"
            )
