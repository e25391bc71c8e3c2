"""How far an installer is, from its lines and from the files that grow while it works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sdkit_dispatch.contract import Progress
from sdkit_dispatch.env.install_plan import InstallPlan
from sdkit_dispatch.env.room import folder_bytes
from sdkit_dispatch.env.vendors import normal_name

_NOW = re.compile(r"\s*(?:Collecting|Downloading|Downloaded) ([A-Za-z0-9._-]+?)(?:==| |$)")
_UNPACKING = re.compile(r"(Installing collected|Prepared)")


def install_progress(
    plan: InstallPlan, *, temporary: Path, cache: Path | None
) -> Callable[[str], Progress]:
    """Returns what a line of an installer, or "" between two lines, means as progress.

    Args:
        plan: What is installed.
        temporary: The installer's folder for temporary files.
        cache: Its download cache.
    """
    names = {normal_name(package.name) for package in plan.packages}
    current = plan.vendor
    phase = "download"
    measure = _Measure(plan=plan, temporary=temporary, cache=cache)

    def progress(line: str) -> Progress:
        nonlocal current, phase
        if _UNPACKING.match(line):
            phase, current = "unpack", plan.vendor
        elif (named := _NOW.match(line)) and (name := normal_name(named[1])) in names:
            current = name
            if line.lstrip().startswith("Downloaded"):
                measure.arrived.add(current)
        fraction = measure.fraction() if phase == "download" else None
        return Progress(phase=f"{phase} {current}", fraction=fraction)

    return progress


class _Measure:
    """Bytes that have arrived, where each installer puts them while it downloads."""

    def __init__(self, *, plan: InstallPlan, temporary: Path, cache: Path | None) -> None:
        self.arrived: set[str] = set()
        self._plan = plan
        self._temporary = temporary
        self._cache = cache

    def fraction(self) -> float | None:
        sizes = {"uv": self._uv, "pip": self._pip}[self._plan.tool]()
        if self._plan.source is not None or sizes is None:
            return None
        done, total = sizes
        return min(1.0, done / total) if total else None

    def _pip(self) -> tuple[int, int]:
        # pip 26 keeps each wheel, fetched or from its cache, in a folder of its own until the end.
        wheels = self._temporary.glob("pip-unpack-*/*.whl")
        return sum(wheel.stat().st_size for wheel in wheels), self._plan.download_bytes

    def _uv(self) -> tuple[int, int] | None:
        # uv 0.13 unpacks while it downloads, into .tmp* folders of its cache.
        if self._cache is None:
            return None
        flying = sum(folder_bytes(folder) for folder in self._cache.glob(".tmp*"))
        arrived = sum(
            package.disk_bytes or 0
            for package in self._plan.packages
            if normal_name(package.name) in self.arrived
        )
        return arrived + flying, self._plan.disk_bytes
