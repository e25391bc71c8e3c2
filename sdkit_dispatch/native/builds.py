"""The builds that are there, and which of them is right for this machine.

    <home>/builds/<vendor>/<fingerprint>/manifest.json and the libraries

A build appears by one rename, and nothing in it is changed afterwards.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.contract import record_from_json
from sdkit_dispatch.detect.processor import processor_features
from sdkit_dispatch.env.states import platform_name
from sdkit_dispatch.errors import VendorEnvError

MANIFEST = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Build:
    """A runtime that was built here.

    Attributes:
        variant: "vulkan".
        fingerprint: Of everything that decides what was built; name of its folder.
        source: Name of the archive, and its sha256.
        flags: Of CMake.
        tools: Need -> the words in which the tool gives its version.
        processor: What it is bound to; empty if it runs on any of the platform.
        variable: Environment variable that tells the vendor's worker of it.
        files: Name -> sha256; complete.
        runtime: As the vendor's probe named it; empty if the vendor was not installed.
        build_s: Seconds that it took.
        created_at: UTC, ISO 8601.
    """

    vendor: str
    variant: str
    fingerprint: str
    source: str
    source_sha256: str
    flags: tuple[str, ...]
    tools: Mapping[str, str]
    platform: str
    processor: str
    variable: str
    files: Mapping[str, str]
    size_bytes: int
    runtime: str
    build_s: float
    created_at: str
    schema: int = SCHEMA

    @property
    def words(self) -> str:
        """What it is: "libggml_python-0.20.2 with vulkan (build 1a2b3c4d)"."""
        return f"{self.source} with {self.variant} (build {self.fingerprint[:8]})"


def builds_folder(vendor: str, home: Path) -> Path:
    """Returns the folder that holds a vendor's builds."""
    return home.absolute() / "builds" / vendor


def builds_of(vendor: str, home: Path) -> tuple[Build, ...]:
    """Returns the whole builds of a vendor, newest first."""
    found = []
    folder = builds_folder(vendor, home)
    for manifest in folder.glob(f"*/{MANIFEST}"):
        build = _read(manifest)
        if build is not None and all((manifest.parent / name).is_file() for name in build.files):
            found.append(build)
    return tuple(sorted(found, key=lambda one: one.created_at, reverse=True))


def right_build(vendor: str, home: Path) -> Build | None:
    """Returns the newest build for this platform and processor."""
    for build in builds_of(vendor, home):
        is_ours = build.platform == platform_name()
        if is_ours and build.processor in ("", processor_features()):
            return build
    return None


def built_variables(vendor: str, home: Path) -> dict[str, str]:
    """Returns the environment variables that tell a vendor's worker of the right build."""
    build = right_build(vendor, home)
    if build is None:
        return {}
    return {build.variable: str(builds_folder(vendor, home) / build.fingerprint)}


def remove_builds(vendor: str, home: Path) -> int:
    """Removes all builds of a vendor; returns how many there were.

    Raises:
        VendorEnvError: A file cannot be removed.
    """
    folder = builds_folder(vendor, home)
    builds = [path for path in folder.glob("*") if path.is_dir()]
    for build in builds:
        # Without it the rest is no build, should we be stopped here.
        (build / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(build, ignore_errors=True)
        if build.exists():
            raise VendorEnvError(
                f"{build} cannot be removed: a program is using it, or it belongs to another user",
                f"stop what uses it, then run sdkit-dispatch vendors build {vendor} --remove again",
            )
    return len(builds)


def _read(manifest: Path) -> Build | None:
    try:
        build = record_from_json(Build, json.loads(manifest.read_text("utf-8")))
    except (OSError, ValueError):
        return None
    return build if build.fingerprint == manifest.parent.name else None
