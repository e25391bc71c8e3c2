"""The wheels of a vendor in a folder, for a machine without internet."""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from sdkit_dispatch.contract import Progress, Report, VendorSpec, no_report
from sdkit_dispatch.env.room import free_bytes, size_in_words
from sdkit_dispatch.env.states import platform_name
from sdkit_dispatch.env.tools import DiskFullError, clean_environment, find_tool, run_tool
from sdkit_dispatch.env.vendors import normal_name, requirements_of
from sdkit_dispatch.errors import ConfigError, VendorEnvError

# A wheel's tag names the oldest glibc it runs on; pip wants all that will do listed, best first.
_GLIBC_MINORS = (39, 38, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_MACOS = (14, 13, 12, 11)
ONLY_WHEELS: tuple[str, ...] = ("--only-binary", ":all:")
_PYTHON_VERSION = re.compile(r"3\.[0-9]{1,2}")
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A platform: its wheel tags, best first, and what requirement markers see there."""

    tags: tuple[str, ...]
    os_name: str
    sys_platform: str
    system: str
    machine: str


def _linux(machine: str) -> _Target:
    tags = []
    for minor in _GLIBC_MINORS:
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _LEGACY:
            tags.append(f"{_LEGACY[minor]}_{machine}")
    return _Target(
        tags=(*tags, f"linux_{machine}"),
        os_name="posix",
        sys_platform="linux",
        system="Linux",
        machine=machine,
    )


def _windows(tag: str, machine: str) -> _Target:
    return _Target(
        tags=(tag,), os_name="nt", sys_platform="win32", system="Windows", machine=machine
    )


def _macos(machine: str) -> _Target:
    # macOS 11 came after 10.16; a universal2 wheel may name a version older than the first ARM Mac.
    kinds = (machine, "universal2")
    tags = [f"macosx_{major}_0_{kind}" for major in _MACOS for kind in kinds]
    older = kinds if machine == "x86_64" else kinds[1:]
    tags += [f"macosx_10_{minor}_{kind}" for minor in range(16, 8, -1) for kind in older]
    return _Target(
        tags=tuple(tags),
        os_name="posix",
        sys_platform="darwin",
        system="Darwin",
        machine=machine,
    )


TARGETS: Mapping[str, _Target] = {
    "linux-x86_64": _linux("x86_64"),
    "linux-arm64": _linux("aarch64"),
    "windows-x86_64": _windows("win_amd64", "AMD64"),
    "windows-arm64": _windows("win_arm64", "ARM64"),
    "macos-arm64": _macos("arm64"),
    "macos-x86_64": _macos("x86_64"),
}


def download(
    spec: VendorSpec,
    to: Path,
    *,
    python_version: str | None = None,
    platform: str | None = None,
    report: Report = no_report,
) -> tuple[Path, ...]:
    """Puts every wheel that `install(..., source=to)` needs into a folder. Returns its wheels.

    Wheels that are there already are not fetched again.

    Args:
        spec: The vendor.
        to: The folder; made if it is missing.
        python_version: Of the other machine: "3.12"; by default as here.
        platform: Of the other machine: "windows-x86_64"; by default as here.
        report: Told of progress.

    Raises:
        ConfigError: The platform or the Python version is not one.
        VendorEnvError: A wheel cannot be had.
    """
    here = (platform_name(), f"{sys.version_info.major}.{sys.version_info.minor}")
    asked = (platform or here[0], python_version or here[1])
    target = TARGETS.get(asked[0])
    if target is None:
        raise ConfigError(f"unknown platform {asked[0]!r}", f"one of: {', '.join(TARGETS)}")
    if not _PYTHON_VERSION.fullmatch(asked[1]):
        raise ConfigError(f"{asked[1]!r} is not the version of a Python", "write it like 3.12")
    markers = _marker_values(target, asked[1])
    options = ONLY_WHEELS
    if asked != here:
        options += ("--implementation", "cp", "--python-version", asked[1])
        options += tuple(word for tag in target.tags for word in ("--platform", tag))
    to = to.absolute()
    wanted: Sequence[str] = requirements_of(spec, marker_values=markers)
    tried: set[str] = set()
    try:
        to.mkdir(parents=True, exist_ok=True)
        # pip follows the markers of the machine it runs on: what only the other one needs
        # (colorama, on Windows) is fetched by name, until nothing is missing.
        while wanted:
            _fetch(wanted, to, options, report)
            tried |= set(wanted)
            wanted = missing_from(to, requirements_of(spec, marker_values=markers), asked=asked)
            if again := tried & set(wanted):
                raise VendorEnvError(f"{', '.join(sorted(again))} cannot be had for {asked[0]}")
    except DiskFullError as error:
        free = size_in_words(free_bytes(to))
        raise VendorEnvError(
            f"not enough room for the wheels of {spec.name} in {to}: {free} are free",
            "choose a folder on another disk",
        ) from error
    except OSError as error:
        raise VendorEnvError(f"{to} cannot be written: {error}", "choose another folder") from error
    return tuple(sorted(to.glob("*.whl")))


def download_source(
    package: str, version: str, *, sha256: str, to: Path, report: Report = no_report
) -> Path:
    """Fetches the source archive of a package, and puts it into a folder. Returns its file.

    Args:
        package: A distribution.
        version: Its version.
        sha256: Of the archive: another one is refused before anything in it runs.
        to: The folder.
        report: Told of progress.

    Raises:
        DiskFullError: The disk is full.
        VendorEnvError: It cannot be had.
    """
    before = set(to.iterdir())
    # pip asks an archive for its metadata, which runs its build backend: hence the digest.
    options = ("--no-binary", package, "--no-deps")
    _fetch([f"{package}=={version} --hash=sha256:{sha256}"], to, options, report)
    found = [path for path in set(to.iterdir()) - before if path.is_file()]
    if len(found) != 1:
        raise VendorEnvError(f"the source archive of {package} {version} cannot be had")
    return found[0]


def missing_from(
    folder: Path, requirements: Sequence[str], *, asked: tuple[str, str]
) -> tuple[str, ...]:
    """Returns the requirements, and those of what they need, that no wheel in a folder meets.

    Args:
        folder: Holds wheels, of this platform and of others.
        requirements: Requirement lines without markers.
        asked: Platform and Python version that the wheels must fit.
    """
    from packaging.requirements import Requirement

    wheels = _wheels_in(folder, asked)
    markers = _marker_values(TARGETS[asked[0]], asked[1])
    missing: list[str] = []
    seen: set[str] = set()
    waiting = list(requirements)
    while waiting:
        line = waiting.pop()
        if line in seen:
            continue
        seen.add(line)
        requirement = Requirement(line)
        fits = [
            wheel
            for wheel in wheels.get(normal_name(requirement.name), ())
            if requirement.specifier.contains(wheel.version, prereleases=True)
        ]
        if not fits:
            missing.append(line)
            continue
        for text in fits[-1].requires:
            inner = Requirement(text)
            extras = {"", *requirement.extras}
            marker, inner.marker = inner.marker, None
            if marker is None or any(marker.evaluate({**markers, "extra": e}) for e in extras):
                waiting.append(str(inner))
    return tuple(sorted(missing))


@dataclass(frozen=True, kw_only=True)
class _Wheel:
    version: str
    requires: tuple[str, ...]


def _wheels_in(folder: Path, asked: tuple[str, str]) -> dict[str, list[_Wheel]]:
    from packaging.tags import compatible_tags, cpython_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    major, minor = (int(part) for part in asked[1].split("."))
    fits = TARGETS[asked[0]].tags
    tags = {
        *cpython_tags((major, minor), platforms=fits),
        *compatible_tags((major, minor), f"cp{major}{minor}", fits),
    }
    wheels: dict[str, list[_Wheel]] = {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, own_tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if own_tags & tags:
            wheel = _Wheel(version=str(version), requires=_requires_of(path))
            wheels.setdefault(name, []).append(wheel)
    return wheels


def _requires_of(wheel: Path) -> tuple[str, ...]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            headers = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise VendorEnvError(f"{wheel} is not a wheel: {error}", "remove it, then try again") from (
            error
        )
    return tuple(headers.get_all("Requires-Dist") or ())


def _fetch(requirements: Sequence[str], to: Path, options: Sequence[str], report: Report) -> None:
    tool = find_tool("pip")  # uv cannot download without installing
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=to) as name:
        asked = Path(name) / "requirements.txt"
        asked.write_text("\n".join(requirements) + "\n", "utf-8")
        run_tool(
            (
                *(*tool.command, "download", "--progress-bar", "off"),
                *(*options, "--dest", str(to), "-r", str(asked)),
            ),
            environment=clean_environment(Path(name)),
            folder=Path(name),
            report=report,
            progress=_progress,
        )


def _progress(line: str) -> Progress:
    words = line.split()
    if len(words) > 1 and words[0] in ("Collecting", "Downloading"):
        return Progress(phase=f"download {words[1].rsplit('/', 1)[-1]}")
    return Progress(phase="download")


def _marker_values(target: _Target, version: str) -> dict[str, str]:
    return {
        "os_name": target.os_name,
        "sys_platform": target.sys_platform,
        "platform_system": target.system,
        "platform_machine": target.machine,
        "python_version": version,
        "python_full_version": f"{version}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
