"""What the commands share: options, a dispatcher for the length of a command, and printing."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .show_devices import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .api import Dispatcher
    from .choice import Choice
    from .lora import Lora

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
Force = Annotated[
    bool, typer.Option("--force", help="Do what the makers of --vendor advise against.")
]
RequireGpu = Annotated[
    bool, typer.Option("--require-gpu", help="Fail instead of running on the CPU.")
]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", help="FILE[:STRENGTH] to add to the weights; may be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@contextmanager
def dispatcher_of(
    context: typer.Context,
    *,
    install: bool | None = None,
    env: str | None = None,
    strict: bool = False,
    is_quiet: bool = False,
    threads: int | None = None,
) -> Iterator[Dispatcher]:
    """Gives a dispatcher with a progress view; both end with the command."""
    from .api import Dispatcher
    from .config import home_folder, load_config
    from .progress import ProgressView

    settings = context.find_root().obj
    home = settings["home"] or home_folder()
    flags = {
        "may_install": None if install is None else ("yes" if install else "no"),
        "env": env,
        "strict": True if strict else None,
        "threads": threads,
    }
    config = load_config(settings["config"], home=home, flags=flags)
    if not settings["verbose"]:
        logging.getLogger().setLevel(config.log_level.upper())
    with (
        ProgressView(is_quiet=is_quiet) as view,
        Dispatcher(home=home, config=config, report=view) as dispatcher,
    ):
        yield dispatcher


def choice_of(
    gpu: str,
    vendor: str | None,
    precision: str | None,
    profile: str | None,
    *,
    check: bool = True,
    retry: bool = False,
    force: bool = False,
    require_gpu: bool = False,
) -> Choice:
    """Returns what the options of a command chose.

    Raises:
        ConfigError: The precision is unknown.
    """
    from typing import get_args

    from .choice import Choice
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
        force=force,
        must_use_gpu=require_gpu,
    )


def loras_of(texts: Sequence[str] | None) -> list[Lora]:
    """Returns what the options `--lora` ask for.

    Raises:
        ConfigError: One cannot be read.
    """
    if not texts:
        return []
    from .lora import lora_from_text

    return [lora_from_text(text) for text in texts]


def print_loras(loras: Any) -> None:  # Any: tuple of AppliedLora, imported late
    """Says on stderr what of the LoRAs has no place in the pipeline."""
    for lora in loras:
        if lora.warning:
            print(f"! {lora.warning}", file=sys.stderr)


def settle_installing(dispatcher: Dispatcher, pipeline: str, choice: Choice) -> None:
    """Asks on a terminal whether the best vendor may be installed; elsewhere it may not."""
    if dispatcher.config.may_install == "ask":
        is_asking = sys.stdin is not None and sys.stdin.isatty()
        dispatcher.settle_installing(pipeline, choice, ask=ask if is_asking else None)


def ask(question: str) -> bool:
    """Puts a yes-or-no question to the user."""
    return typer.confirm(question, err=True)


def spec_named(dispatcher: Dispatcher, name: str) -> Any:  # Any: VendorSpec, imported late
    """Returns the vendor of that name; "auto" is the best for this machine.

    Raises:
        ConfigError: There is none; names those that there are.
    """
    from .errors import ConfigError

    if name == "auto":
        return dispatcher.best_installable()
    if name not in dispatcher.specs:
        raise ConfigError(
            f"there is no vendor '{name}'; there are {', '.join(dispatcher.specs)}",
            "sdkit-dispatch vendors list",
        )
    return dispatcher.specs[name]


def print_steps(steps: Any) -> None:  # Any: tuple of Step, imported late
    """Says on stderr which ways were tried in vain, and why."""
    for step in steps:
        print(f"! {step.vendor} on {step.device} did not serve: {step.reason}", file=sys.stderr)


def print_unchecked(answer: Any) -> None:  # Any: GenerateAnswer, imported late
    """Says on stderr which engines made an image without having passed the numeric gate."""
    for component, reason in answer.unchecked.items():
        print(f"! the engine of {component} is unchecked: {reason}", file=sys.stderr)


def print_not_stored() -> None:
    """Says on stderr that the engines of this run are gone with it."""
    print("! the engines are not kept: the store cannot be written", file=sys.stderr)


def verdict_words(verdict: Any) -> str:  # Any: Verdict, imported late
    """Returns what the numeric gate said, in a few words."""
    if verdict.status != "passed":
        return f"{verdict.status}: {verdict.reason}" if verdict.reason else str(verdict.status)
    worst = max((entry["relative_max"] for entry in verdict.metrics.values()), default=0.0)
    return f"checked, error {worst:.1e}"


def duration_words(seconds: float) -> str:
    """Returns "3.2 ms" or "12.5 s"."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def print_json(document: dict[str, Any]) -> None:  # Any: JSON data
    """Prints a JSON document with its schema version."""
    document = {"schema_version": SCHEMA_VERSION, **document}
    print(json.dumps(document, indent=2, allow_nan=False))
