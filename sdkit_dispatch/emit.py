"""The source of a program that computes one component, written by the vendor of its engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .build import Builder
from .component_build import ComponentBuild
from .contract import Plan, Progress, Report, record_to_json
from .env import Environment
from .errors import ConfigError
from .wanted import Wanted
from .whole_folder import require_free, whole_folder

VENDOR = "ggml"
"""Who writes it, if nobody else is named."""
MARK = "emitted.json"
"""In every folder that was written so: what for."""


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """A written program.

    Attributes:
        built: The engine that it computes the same as.
        files: Relative to `folder`, in order.
    """

    folder: Path
    plan: Plan
    built: ComponentBuild
    files: tuple[str, ...]


def emit_component(
    builder: Builder,
    want: Wanted,
    plans: Sequence[Plan],
    *,
    component: str,
    out: Path,
    may_replace: bool,
    report: Report,
) -> Emitted:
    """Builds the engine of a component, or finds it, and has its vendor write the program.

    Raises:
        ConfigError: There is no such component, the vendor writes no source code, or `out` is not
            free.
        DispatchError: The engine cannot be built, or not be written as source code.
    """
    if component not in want.shapes:
        raise ConfigError(
            f"there is no component '{component}'; there are {', '.join(want.shapes)}"
        )
    workers = builder.tools.workers
    spec = workers.specs[plans[0].vendor]
    # Said before anything is built; a vendor that is yet to be installed says it afterwards.
    require_free(out, mark=MARK, may_replace=may_replace)
    if isinstance(workers.environment(spec), Environment) and not workers.client(spec).can_emit():
        raise ConfigError(
            f"the vendor '{spec.name}' writes no source code", f"name {VENDOR} with --vendor"
        )
    result = builder.build(want, plans, report, names=[component])
    (built,) = result.components
    report(Progress(phase=f"{result.plan.vendor}: write the program of {component}"))
    with whole_folder(out, mark=MARK, may_replace=may_replace) as folder:
        workers.client(workers.specs[result.plan.vendor]).emit(built.engine, folder)
        about = {"key": built.engine.key, "request": record_to_json(built.engine.request)}
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        (folder / MARK).write_text(text, encoding="utf-8", newline="\n")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    return Emitted(folder=out, plan=result.plan, built=built, files=tuple(files))
