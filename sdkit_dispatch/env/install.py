"""Makes, replaces and removes a vendor's managed environment.

`<home>/env/<vendor>/` holds a folder for each environment that was made, and `current.json`, which
names the valid one and is written last, at once: whatever is killed, either the old environment or
the new one is whole. The next installation sweeps the rest away.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdkit_dispatch.contract import Progress, Rejection, Report, VendorSpec, no_report
from sdkit_dispatch.env.environment import (
    POINTER,
    POINTER_SCHEMA,
    Environment,
    Pointer,
    managed_environment,
    read_pointer,
    vendor_folder,
)
from sdkit_dispatch.env.install_plan import InstallPlan, planned_packages
from sdkit_dispatch.env.new_environment import NewEnvironment, make_environment, write_error
from sdkit_dispatch.env.room import folder_bytes
from sdkit_dispatch.env.tools import (
    POLL_S,
    DiskFullError,
    Tool,
    ToolChoice,
    cache_folder,
    clean_environment,
    find_tool,
    newer_pip,
)
from sdkit_dispatch.env.vendors import requirements_of
from sdkit_dispatch.errors import VendorEnvError

LOCK = "lock"


def plan_install(
    spec: VendorSpec,
    *,
    home: Path,
    source: Path | None = None,
    tool: ToolChoice = "auto",
    report: Report = no_report,
) -> InstallPlan:
    """Finds out what `install` would fetch, and how big it is. Installs nothing.

    Args:
        spec: The vendor.
        home: The home folder.
        source: A folder of wheels, made by `download`, to use instead of an index.
        tool: The installer.
        report: Told of progress.

    Raises:
        VendorEnvError: There is no installer, or the requirements cannot be satisfied.
    """
    with tempfile.TemporaryDirectory(prefix="sdkit-dispatch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        chosen = find_tool(tool, is_offline=source is not None)
        try:
            return _plan(spec, home, source, tool=chosen, folder=folder, report=report)[0]
        except (OSError, DiskFullError) as error:
            raise write_error(error, None, vendor=spec.name, folder=folder) from error


def install(
    spec: VendorSpec,
    *,
    home: Path,
    report: Report = no_report,
    source: Path | None = None,
    plan: InstallPlan | None = None,
    tool: ToolChoice = "auto",
    reinstall: bool = False,
) -> Environment:
    """Makes a vendor's environment, if there is none that is whole and new enough.

    Two installations of one vendor never run at once: the second waits, and takes what the first
    has made. A failed one leaves the environment that was there as it was; a good one removes it,
    so a worker that runs in it should be stopped first.

    Args:
        spec: The vendor, with the build of its runtime that is wanted (`VendorSpec.of_variant`).
        home: The home folder.
        report: Told of progress; what it raises ends the installation.
        source: A folder of wheels, made by `download`, to use instead of an index.
        plan: From `plan_install`, so that what was announced is what is installed.
        tool: The installer.
        reinstall: Make it even if there is a good one.

    Raises:
        VendorEnvError: It failed; says why, and the sizes if the disk is full.
    """
    base = vendor_folder(spec.name, home)
    with _locked(base, spec, report):
        _sweep(spec, home)
        existing = managed_environment(spec, home=home)
        is_right = isinstance(existing, Environment) and existing.variant == spec.variant
        if isinstance(existing, Environment) and is_right and not reinstall:
            return existing
        # Names of their own: the installer of a killed process may still be writing to the last.
        folder = base / secrets.token_hex(3)
        temporary = folder.with_suffix(".tmp")
        try:
            temporary.mkdir()
            chosen = find_tool(plan.tool if plan else tool, is_offline=source is not None)
            if plan is None:
                plan, chosen = _plan(
                    spec, home, source, tool=chosen, folder=temporary, report=report
                )
            new = make_environment(plan, folder, tool=chosen, temporary=temporary, report=report)
            made = _accept(spec, folder, new, candidate=temporary / POINTER)
        except (OSError, DiskFullError) as error:
            raise write_error(error, plan, vendor=spec.name, folder=folder) from error
        finally:
            _sweep(spec, home)
    return made


def remove(spec: VendorSpec, *, home: Path, report: Report = no_report) -> bool:
    """Removes a vendor's managed environment. Returns whether there was one.

    Raises:
        VendorEnvError: A file of it cannot be removed.
    """
    base = vendor_folder(spec.name, home)
    if not base.is_dir():
        return False
    with _locked(base, spec, report):
        had_one = (base / POINTER).exists()
        (base / POINTER).unlink(missing_ok=True)
        left = _sweep(spec, home)
    if left:
        raise VendorEnvError(
            f"{left[0]} cannot be removed: a program is using it, or it belongs to another user",
            f"stop what uses it, then run sdkit-dispatch vendors remove {spec.name} again",
        )
    return had_one


def _plan(
    spec: VendorSpec,
    home: Path,
    source: Path | None,
    *,
    tool: Tool,
    folder: Path,
    report: Report,
) -> tuple[InstallPlan, Tool]:
    is_offline = source is not None
    if source is not None:
        source = source.absolute()
        if not source.is_dir():
            raise VendorEnvError(f"{source} is not a folder", _download_hint(spec))
    environment = clean_environment(folder, is_offline=is_offline)
    if not is_offline:
        tool = newer_pip(tool, folder, environment=environment, report=report)
    try:
        packages = planned_packages(
            requirements_of(spec),
            tool=tool,
            python=Path(sys.executable),
            source=source,
            environment=environment,
            folder=folder,
            report=report,
        )
    except DiskFullError:
        raise
    except VendorEnvError as error:
        hint = _download_hint(spec) if is_offline else spec.install_note or error.hint
        message = f"what {spec.name} needs cannot be found: {error.message}"
        raise VendorEnvError(message, hint) from error
    cache = None if is_offline else cache_folder(tool, environment)
    plan = InstallPlan(
        vendor=spec.name,
        folder=vendor_folder(spec.name, home),
        tool=tool.name,
        packages=packages,
        source=source,
        cache=cache,
    )
    return plan, tool


def _download_hint(spec: VendorSpec) -> str:
    return f"run `sdkit-dispatch vendors download {spec.name} --to DIR` where there is internet"


def _accept(spec: VendorSpec, folder: Path, new: NewEnvironment, *, candidate: Path) -> Environment:
    """Makes a new environment the valid one, unless it lacks something."""
    base = folder.parent
    data = {
        "schema": POINTER_SCHEMA,
        "folder": folder.name,
        "python": new.python,
        "search_path": new.search_path,
        "size_bytes": folder_bytes(folder),
        "variant": spec.variant,
    }
    with candidate.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    made = managed_environment(spec, home=base.parent.parent, pointer_file=candidate)
    if isinstance(made, Rejection):
        raise VendorEnvError(f"the new environment is not right: {made.reason}", made.hint)
    os.replace(candidate, base / POINTER)
    return made


@contextmanager
def _locked(base: Path, spec: VendorSpec, report: Report) -> Iterator[None]:
    import filelock

    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VendorEnvError(
            f"{base} cannot be made: {error.strerror or error}",
            "put the home folder somewhere else with SDKIT_DISPATCH_HOME",
        ) from error
    lock = filelock.FileLock(base / LOCK)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=POLL_S)
        except filelock.Timeout:
            report(Progress(phase=f"wait for another installation of {spec.name}"))
    try:
        yield
    finally:
        lock.release()


def _sweep(spec: VendorSpec, home: Path) -> list[Path]:
    """Removes what is in a vendor's folder but the valid environment. Returns what stays."""
    valid = read_pointer(spec, home)
    kept = {LOCK, POINTER} | ({valid.folder.name} if isinstance(valid, Pointer) else set())
    others = [path for path in vendor_folder(spec.name, home).iterdir() if path.name not in kept]
    for path in others:
        # A program may use an old one (Windows forbids it): the next installation tries again.
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in others if path.exists()]
