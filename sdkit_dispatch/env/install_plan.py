"""What an installation will fetch and how big that is, found out before anything is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdkit_dispatch.contract import Progress, Report
from sdkit_dispatch.env.room import size_in_words, unpacked_bytes
from sdkit_dispatch.env.tools import Tool, run_tool
from sdkit_dispatch.errors import VendorEnvError

UNPACKED_PER_DOWNLOADED = 3.5
"""Bytes on disk for each byte of a wheel, where only the wheel's size is known. Measured
2026-11-30 on Linux with Python 3.11: 3.3 for openvino and 3.2 for onnxruntime, each with all that
an environment holds."""
SIZE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PlannedPackage:
    """One wheel that an environment will hold.

    Attributes:
        download_bytes: Size of the wheel; None if its index does not say.
        disk_bytes: Unpacked; an estimate unless the wheel is a local file.
    """

    name: str
    version: str
    url: str
    download_bytes: int | None
    disk_bytes: int | None

    @property
    def pin(self) -> str:
        """The requirement that means exactly this package."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, kw_only=True)
class InstallPlan:
    """What `install` will do.

    Attributes:
        folder: Where the environment will be.
        tool: "uv" or "pip".
        source: The folder of wheels it is made from; None for an index.
        cache: The download cache, which grows by as much as is downloaded.
    """

    vendor: str
    folder: Path
    tool: Literal["uv", "pip"]
    packages: tuple[PlannedPackage, ...]
    source: Path | None = None
    cache: Path | None = None

    @property
    def download_bytes(self) -> int:
        """What is fetched at most: packages in the download cache are not fetched again."""
        local = self.source is not None
        return 0 if local else sum(package.download_bytes or 0 for package in self.packages)

    @property
    def disk_bytes(self) -> int:
        """What the environment takes."""
        return sum(package.disk_bytes or 0 for package in self.packages)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Packages whose size is not known and not counted."""
        return tuple(p.name for p in self.packages if p.disk_bytes is None)

    @property
    def summary(self) -> str:
        """What will be fetched and how big it is, in a sentence."""
        fetch = (
            f"taken from {self.source}"
            if self.source is not None
            else f"about {size_in_words(self.download_bytes)} to download"
        )
        unknown = f", not counting {', '.join(self.unknown)}" if self.unknown else ""
        return (
            f"{self.vendor}: {len(self.packages)} packages, {fetch}, "
            f"about {size_in_words(self.disk_bytes)} on disk in {self.folder}{unknown}"
        )


def index_options(tool: str, source: Path | None) -> tuple[str, ...]:
    """Returns where packages come from: one folder and no settings of the user, or the index."""
    if source is None:
        return ()
    own = ("--no-config", "--offline") if tool == "uv" else ()
    return (*own, "--no-index", "--find-links", str(source))


def planned_packages(
    requirements: Sequence[str],
    *,
    tool: Tool,
    python: Path,
    source: Path | None,
    environment: Mapping[str, str],
    folder: Path,
    report: Report,
) -> tuple[PlannedPackage, ...]:
    """Resolves requirements for a Python, without installing anything.

    Args:
        requirements: Requirement lines.
        tool: The installer.
        python: Of the environment, or one of the same version.
        source: A folder of wheels instead of the index.
        environment: The installer's variables.
        folder: For its files.
        report: Told of progress.

    Raises:
        VendorEnvError: They cannot be satisfied; with the installer's words.
    """
    resolve = _resolve_with_uv if tool.name == "uv" else _resolve_with_pip
    asked = folder / "requirements.txt"
    asked.write_text("\n".join(requirements) + "\n", "utf-8")
    answer = folder / ("pylock.toml" if tool.name == "uv" else "report.json")
    answer.unlink(missing_ok=True)
    command = resolve(tool, python, asked, answer)
    run_tool(
        (*command, *index_options(tool.name, source)),
        environment=environment,
        folder=folder,
        report=report,
        progress=lambda _: Progress(phase="find out what to download"),
    )
    from concurrent.futures import ThreadPoolExecutor  # late, as below: `plan` imports us

    read = _packages_from_lock if tool.name == "uv" else _packages_from_report
    try:
        entries = read(answer.read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VendorEnvError(f"the answer of {tool.name} cannot be read: {error!r}") from error
    entries = [_located(entry, source) for entry in entries]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(pool.map(_with_sizes, sorted(entries, key=lambda entry: entry.name)))


def _resolve_with_uv(tool: Tool, python: Path, asked: Path, answer: Path) -> tuple[str, ...]:
    options = ("--only-binary", ":all:", "--no-header", "--quiet", "--python", str(python))
    return (
        *(*tool.command, "pip", "compile", *options),
        *("--format", "pylock.toml", "-o", str(answer), str(asked)),
    )


def _resolve_with_pip(tool: Tool, python: Path, asked: Path, answer: Path) -> tuple[str, ...]:
    return (
        *(*tool.pip_command(python), "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--only-binary", ":all:", "--progress-bar", "off"),
        *("--report", str(answer), "-r", str(asked)),
    )


def _packages_from_lock(text: str) -> list[PlannedPackage]:
    import tomllib

    packages = []
    for entry in tomllib.loads(text).get("packages", []):
        file = entry["archive"] if "archive" in entry else entry["wheels"][0]
        where = file.get("url") or file.get("path") or ""
        packages.append(_package(entry["name"], entry["version"], where, file.get("size")))
    return packages


def _packages_from_report(text: str) -> list[PlannedPackage]:
    import json

    return [
        _package(
            entry["metadata"]["name"],
            entry["metadata"]["version"],
            entry["download_info"]["url"],
            None,
        )
        for entry in json.loads(text)["install"]
    ]


def _package(name: str, version: str, url: str, size: Any) -> PlannedPackage:
    # Any: a value of a TOML table.
    known = size if isinstance(size, int) else None
    return PlannedPackage(
        name=name, version=version, url=url, download_bytes=known, disk_bytes=None
    )


def _located(package: PlannedPackage, source: Path | None) -> PlannedPackage:
    # uv writes the path of a local wheel relative to its answer, or none at all.
    if source is None:
        return package
    import urllib.parse

    name = urllib.parse.unquote(package.url.replace("\\", "/").rsplit("/", 1)[-1])
    return replace(package, url=(source / name).as_uri())


def _with_sizes(package: PlannedPackage) -> PlannedPackage:
    import urllib.parse
    import urllib.request

    url = urllib.parse.urlsplit(package.url)
    if url.scheme == "file":
        wheel = Path(urllib.request.url2pathname(url.path))
        if wheel.is_file():
            return replace(
                package, download_bytes=wheel.stat().st_size, disk_bytes=unpacked_bytes(wheel)
            )
    size = package.download_bytes
    if size is None and url.scheme in ("http", "https"):
        size = _size_at(package.url)
    disk = None if size is None else int(size * UNPACKED_PER_DOWNLOADED)
    return replace(package, download_bytes=size, disk_bytes=disk)


def _size_at(url: str) -> int | None:
    import urllib.request

    # pip's report has no sizes. A server that does not answer this costs an exact number, no more.
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SIZE_TIMEOUT_S) as response:
            return int(response.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None
