"""A virtual environment with the packages of a plan in it, made in a folder of its own."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.contract import Progress, Report
from sdkit_dispatch.env.install_plan import InstallPlan, index_options
from sdkit_dispatch.env.progress import install_progress
from sdkit_dispatch.env.room import check_room, free_bytes, is_same_disk, not_enough_room
from sdkit_dispatch.env.tools import DiskFullError, Tool, clean_environment, run_tool
from sdkit_dispatch.errors import VendorEnvError

ROOM_TO_SPARE_BYTES = 4_000_000
"""For the environment itself, the installer's notes and ours. Measured on Linux: 0.1 MB; on Windows
an environment copies its Python, about 1 MB."""
CHECK_TIMEOUT_S = 180
"""The first import of numpy takes seconds on a cold disk with a virus scanner."""

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))

# numpy is the one compiled package that every worker needs; the runtime is tried by `probe`.
_CHECK = """
import json, os, sys, sysconfig
import numpy
paths = sysconfig.get_paths()
print(json.dumps([os.path.relpath(paths[name], sys.prefix) for name in ("purelib", "platlib")]))
"""


@dataclass(frozen=True, kw_only=True)
class NewEnvironment:
    """A whole environment.

    Attributes:
        python: Relative to its folder, as are the entries of `search_path`.
    """

    python: str
    search_path: tuple[str, ...]


def make_environment(
    plan: InstallPlan, folder: Path, *, tool: Tool, temporary: Path, report: Report
) -> NewEnvironment:
    """Makes the environment; on failure the folder may be left in any state.

    Args:
        plan: What it will hold.
        folder: Must not exist.
        tool: The installer.
        temporary: An empty folder on the same disk.
        report: Told of progress; what it raises ends the work.

    Raises:
        DiskFullError: The installer met a full disk; `write_error` says the sizes.
        OSError: A file could not be written.
        VendorEnvError: It failed, or a disk has too little room; with the sizes.
    """
    cache = _cache_with_room(plan, tool, temporary)
    environment = clean_environment(temporary, cache=cache, is_offline=plan.source is not None)
    if plan.cache and cache is None and not is_same_disk(plan.cache, folder):
        environment["UV_LINK_MODE"] = "copy"  # what it does anyway, without the warning
    run_tool(
        _venv_command(tool, folder),
        environment=environment,
        folder=temporary,
        report=report,
        progress=lambda _: Progress(phase=f"make the environment of {plan.vendor}"),
    )
    python = _python_in(folder)
    run_tool(
        _install_command(tool, python, plan),
        environment=environment,
        folder=temporary,
        report=report,
        progress=install_progress(plan, temporary=temporary, cache=cache or plan.cache),
    )
    report(Progress(phase=f"check {plan.vendor}"))
    return NewEnvironment(
        python=python.relative_to(folder).as_posix(),
        search_path=_checked(python, environment, temporary),
    )


def write_error(
    error: OSError | DiskFullError, plan: InstallPlan | None, *, vendor: str, folder: Path
) -> VendorEnvError:
    """Returns the error for a user whose disk did not take an environment; nothing is removed yet.

    Args:
        error: What was met.
        plan: As far as it was known by then.
        vendor: Name of the vendor.
        folder: Of the environment.
    """
    if isinstance(error, DiskFullError):
        detail = (error.message.strip().splitlines() or [""])[-1]
    elif error.errno in _FULL:
        detail = str(error.strerror)
    else:
        return VendorEnvError(
            f"the environment of {vendor} cannot be made: {error}",
            "look at that folder, or put the home folder somewhere else with SDKIT_DISPATCH_HOME",
        )
    disks = [(folder, needed_bytes(plan, plan.tool) if plan else ROOM_TO_SPARE_BYTES)]
    if plan and plan.cache and not is_same_disk(plan.cache, folder):
        in_cache = plan.disk_bytes if plan.tool == "uv" else plan.download_bytes
        disks.append((plan.cache, in_cache))
    fullest, needed = min(disks, key=lambda disk: free_bytes(disk[0]))
    return not_enough_room(vendor, fullest, needed=needed, free=free_bytes(fullest), detail=detail)


def needed_bytes(plan: InstallPlan, tool: str) -> int:
    """Returns what an installation takes on the disk of the home folder while it runs."""
    # pip has the wheels in its temporary folder while it unpacks them, and the one that it
    # downloads a second time; uv unpacks as it downloads.
    largest = max((package.download_bytes or 0 for package in plan.packages), default=0)
    wheels = plan.download_bytes and plan.download_bytes + largest
    return ROOM_TO_SPARE_BYTES + plan.disk_bytes + (wheels if tool == "pip" else 0)


def _cache_with_room(plan: InstallPlan, tool: Tool, temporary: Path) -> Path | None:
    """Checks the room where it will be used. Returns a cache to use instead of the user's own."""
    in_cache = plan.disk_bytes if tool.name == "uv" else plan.download_bytes
    needed = needed_bytes(plan, tool.name)
    if plan.cache is None:  # from local wheels: the user's cache has no use for them
        check_room([(temporary, needed)], what=plan.vendor)
        return temporary / "cache"
    if is_same_disk(plan.cache, temporary):
        # uv links the files of its cache into the environment instead of copying them.
        extra = 0 if tool.name == "uv" else in_cache
        check_room([(temporary, needed + extra)], what=plan.vendor)
        return None
    if free_bytes(plan.cache) > in_cache:
        check_room([(temporary, needed)], what=plan.vendor)
        return None
    extra = 0 if tool.name == "uv" else in_cache
    check_room([(temporary, needed + extra)], what=plan.vendor)
    return temporary / "cache"


def _venv_command(tool: Tool, folder: Path) -> tuple[str, ...]:
    if tool.name == "uv":
        options = ("--no-project", "--quiet", "--python", sys.executable)
        return (*tool.command, "venv", *options, str(folder))
    return (sys.executable, "-I", "-m", "venv", "--without-pip", str(folder))


def _install_command(tool: Tool, python: Path, plan: InstallPlan) -> tuple[str, ...]:
    options = ("--no-deps", "--only-binary", ":all:", *index_options(tool.name, plan.source))
    pins = tuple(package.pin for package in plan.packages)
    if tool.name == "uv":
        return (*tool.command, "pip", "install", "--python", str(python), *options, *pins)
    quiet = ("--progress-bar", "off", "--no-warn-script-location", "--no-compile")
    return (*tool.pip_command(python), "install", *quiet, *options, *pins)


def _python_in(folder: Path) -> Path:
    posix = folder / "bin" / "python"
    return posix if posix.exists() else folder / "Scripts" / "python.exe"


def _checked(python: Path, environment: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Starts the new Python. Returns where it keeps its packages, relative to its folder."""
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _CHECK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=folder,
            env=dict(environment),
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=CHECK_TIMEOUT_S,
            check=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        ).stdout
        return tuple(dict.fromkeys(Path(entry).as_posix() for entry in json.loads(answer)))
    except (subprocess.SubprocessError, ValueError) as error:
        words = str(getattr(error, "stderr", "") or error).strip()
        raise VendorEnvError(f"the new environment does not work: {words}") from error
