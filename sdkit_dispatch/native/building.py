"""Builds a runtime with CMake: whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.contract import Progress, Report, VendorSpec, no_report, record_to_json
from sdkit_dispatch.detect.processor import processor_features
from sdkit_dispatch.env.room import free_bytes, not_enough_room
from sdkit_dispatch.env.states import platform_name
from sdkit_dispatch.env.tools import DiskFullError, run_tool
from sdkit_dispatch.errors import VendorEnvError
from sdkit_dispatch.native.builds import MANIFEST, Build, builds_folder, builds_of
from sdkit_dispatch.native.preflight import Found, check_machine
from sdkit_dispatch.native.recipe import Recipe, Variant, recipe_of
from sdkit_dispatch.native.source import archive_digest, source_name, unpacked_source
from sdkit_dispatch.whole_file import write_whole

Accept = Callable[[Recipe, Path], str]
"""Tries a build in its folder; returns the runtime as the vendor names it, "" if it cannot be
tried; raises VendorEnvError if it does not serve."""

FINGERPRINT_CHARS = 24
TEMPORARY = "tmp"
"""For the compilers' own files, on the disk whose room was looked at."""
_PERCENT = re.compile(r"\[\s*(\d{1,3})%\]")
_STEPS = re.compile(r"\[(\d+)/(\d+)\]")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Everything that decides what is built, and where things are."""

    vendor: str
    name: str
    variant: Variant
    recipe: Recipe
    found: Mapping[str, Found]
    flags: tuple[str, ...]
    digest: str
    given: Path | None
    jobs: int

    @property
    def tools(self) -> dict[str, str]:
        return {name: found.words or str(found.path) for name, found in self.found.items()}

    @property
    def processor(self) -> str:
        return processor_features() if self.variant.is_native else ""

    @property
    def fingerprint(self) -> str:
        facts = [
            self.vendor,
            self.name,
            self.digest,
            self.flags,
            self.tools,
            platform_name(),
            self.processor,
        ]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_CHARS]


def build(
    spec: VendorSpec,
    variant: str,
    *,
    home: Path,
    accept: Accept,
    source: Path | None = None,
    jobs: int | None = None,
    report: Report = no_report,
) -> Build:
    """Builds a vendor's runtime, or returns the build of the same that is there.

    Args:
        spec: The vendor.
        variant: As its recipe names it.
        home: The home folder.
        accept: Tries the build before it takes its place.
        source: The source archive; by default the recipe's, which is downloaded.
        jobs: Compilers at once; by default as many as there are processors.
        report: Told of progress; what it raises ends the build, and nothing is left.

    Raises:
        ConfigError: There is no recipe, or no such variant.
        VendorEnvError: Something is missing here, or it failed; with the compiler's words.
    """
    recipe = recipe_of(spec)
    found = check_machine(recipe, variant, vendor=spec.name, folder=home / "tmp")
    paths = {name: str(one.path) for name, one in found.items()}
    chosen = recipe.variant(variant)
    given = source.absolute() if source else None
    own = chosen.platform_flags.get(platform_name().partition("-")[0], ())
    order = _Order(
        vendor=spec.name,
        name=variant,
        variant=chosen,
        recipe=recipe,
        found=found,
        flags=tuple(flag.format_map(paths) for flag in (*recipe.flags, *chosen.flags, *own)),
        digest=archive_digest(given, recipe.source),
        given=given,
        jobs=jobs or len(_processors()),
    )
    store = EngineStore(home)

    def waiting() -> None:
        report(Progress(phase=f"wait for another build of {spec.name}"))

    with store.locked(order.fingerprint, while_waiting=waiting):
        for one in builds_of(spec.name, home):
            if one.fingerprint == order.fingerprint:
                return one
        with store.workshop(order.fingerprint) as workshop:
            try:
                made = _build(order, workshop, accept=accept, report=report)
                target = builds_folder(spec.name, home) / order.fingerprint
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)  # one that a file is missing of
                os.replace(workshop / order.fingerprint, target)
            except DiskFullError as error:
                words = error.message.strip().splitlines()[-1]
                needed = chosen.disk_mb * 10**6
                raise not_enough_room(
                    f"a build of {spec.name}",
                    workshop,
                    needed=needed,
                    free=free_bytes(workshop),
                    detail=words,
                ) from error
    return made


def _build(order: _Order, workshop: Path, *, accept: Accept, report: Report) -> Build:
    """Builds into the workshop; returns the manifest that was written there."""
    started_s = time.monotonic()
    fetched, output = workshop / "source", workshop / "output"
    for folder in (fetched, output, workshop / TEMPORARY):
        folder.mkdir()
    report(Progress(phase=f"fetch the source of {order.vendor}"))
    place = unpacked_source(order.given, order.recipe.source, fetched, report)
    for phase, command in _commands(order, place, workshop / "objects", output):
        _run(command, order, workshop, phase=f"{phase} {order.vendor}", report=report)
    made = workshop / order.fingerprint
    # A project may overrule where we want a library (ggml does, for its modules).
    _collect(order, (output, workshop / "objects"), made)
    report(Progress(phase=f"try {order.vendor}"))
    runtime = accept(order.recipe, made)
    plain = sorted(path for path in made.iterdir() if not path.is_symlink())
    manifest = Build(
        vendor=order.vendor,
        variant=order.name,
        fingerprint=order.fingerprint,
        source=source_name(place, order.recipe.source),
        source_sha256=order.digest,
        flags=order.flags,
        tools=order.tools,
        platform=platform_name(),
        processor=order.processor,
        variable=order.recipe.variable,
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in plain},
        size_bytes=sum(path.stat().st_size for path in plain),
        runtime=runtime,
        build_s=round(time.monotonic() - started_s, 1),
        created_at=datetime.now(UTC).isoformat(),
    )
    write_whole(made / MANIFEST, json.dumps(record_to_json(manifest), indent=1).encode())
    return manifest


def _commands(
    order: _Order, place: Path, objects: Path, output: Path
) -> list[tuple[str, list[str]]]:
    cmake = str(order.found["cmake"].path)
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    flags = [
        *order.flags,
        "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"CMAKE_INSTALL_RPATH={origin}",  # each library finds the others beside it
        f"CMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
        f"CMAKE_RUNTIME_OUTPUT_DIRECTORY={output}",
    ]
    has_ninja = shutil.which("ninja") is not None and sys.platform != "win32"
    configure = [cmake, "-S", str(place), "-B", str(objects), *(f"-D{flag}" for flag in flags)]
    compile_ = [cmake, "--build", str(objects), "--config", "Release"]
    return [
        ("configure", [*configure, *(["-G", "Ninja"] if has_ninja else [])]),
        ("compile", [*compile_, "--parallel", str(order.jobs)]),
    ]


def _run(
    command: Sequence[str], order: _Order, folder: Path, *, phase: str, report: Report
) -> None:
    # What steers make or CMake from outside would build something else than the manifest says.
    left_out = ("MAKEFLAGS", "MFLAGS", "CMAKE_GENERATOR", "CMAKE_BUILD_TYPE", "DESTDIR")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    done = 0.0

    def progress(line: str) -> Progress:
        nonlocal done
        done = fraction_in(line, done)
        return Progress(phase=phase, fraction=done or None)

    try:
        run_tool(
            command,
            environment={**kept, "TMPDIR": str(folder / TEMPORARY), "NINJA_STATUS": "[%f/%t] "},
            folder=folder,
            report=report,
            progress=progress,
        )
    except DiskFullError:
        raise
    except VendorEnvError as error:
        raise VendorEnvError(
            f"{order.vendor} could not be built with {order.name}: {error.message}",
            "run it again with --verbose to see every line of the compiler",
        ) from error


def fraction_in(line: str, before: float) -> float:
    """Returns how far a compiler says it is, 0..1; `before` where the line says nothing."""
    if percent := _PERCENT.search(line):
        return min(1.0, int(percent[1]) / 100)
    if (steps := _STEPS.search(line)) and int(steps[2]):
        return min(1.0, int(steps[1]) / int(steps[2]))
    return before


def _collect(order: _Order, places: Sequence[Path], made: Path) -> None:
    """Moves the libraries into the build's folder, links to them included."""
    made.mkdir()
    patterns = (*order.recipe.must_have, *order.variant.must_have)
    found = (
        path
        for place in places
        for pattern in order.recipe.libraries
        for path in sorted(place.rglob(pattern))
    )
    for path in found:
        if path.is_symlink() or path.is_file():
            path.rename(made / path.name)
    missing = [pattern for pattern in patterns if not any(made.glob(pattern))]
    if missing:
        raise VendorEnvError(
            f"the build of {order.vendor} with {order.name} gave no {', '.join(missing)}",
            "sdkit-dispatch --verbose vendors build shows what CMake said",
        )


def _processors() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
