"""Where libggml may be: an ordered list of folders, each a complete build.

Modules of different builds never mix: a module binds to the libggml-base beside it. So a provider
is one folder, and everything is loaded from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

FOLDER_VARIABLE = "SDKIT_GGML_DIR"
BUILT_VARIABLE = "SDKIT_GGML_BUILT_DIR"
"""Set by whoever starts a worker, where `vendors build` has made a build for this machine."""
BUILT_HERE = "this machine's build"
BUILD_ID_CHARS = 8
"""Of the name of a build's folder, which is its fingerprint."""

_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
_PREFIX = "" if sys.platform == "win32" else "lib"
SUFFIX = _SUFFIXES.get(sys.platform, ".so")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A distribution that brings libggml.

    Attributes:
        folders: Where it may be, below the folder of packages.
    """

    distribution: str
    folders: tuple[str, ...]


def _repaired(name: str) -> Wheel:
    """A wheel whose libraries were moved by auditwheel, delvewheel or delocate."""
    package = name.partition("-")[0]
    return Wheel(
        distribution=name,
        folders=(f"{name.replace('-', '_')}.libs", f"{package}/.dylibs", f"{package}/lib", package),
    )


WHEELS: tuple[Wheel, ...] = (
    # All processor variants, and Vulkan or Metal.
    Wheel(distribution="transcribe-cpp-native", folders=("transcribe_cpp_native/_native",)),
    # One processor variant for all (0.7.0: CPython 3.12 and newer), one kind of GPU each.
    *(
        _repaired(f"{package}{flavour}")
        for flavour in ("-cuda12", "-rocm", "-sycl", "-vulkan", "")
        for package in ("cyllama", "inferna")
    ),
    # The processor only; Metal on a Mac.
    Wheel(
        distribution="libggml-python",
        folders=("libggml/lib64", "libggml/lib", "libggml/bin"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A folder with a build of ggml.

    Attributes:
        name: "SDKIT_GGML_DIR", "this machine's build", or the distribution that brought it.
        is_explicit: The user named it: no other may take its place.
    """

    name: str
    folder: Path
    is_explicit: bool = False

    @property
    def build_id(self) -> str:
        """Tells builds of ours apart, which may be of one version; empty for all others."""
        is_ours = self.name == BUILT_HERE
        return self.folder.name[:BUILD_ID_CHARS] if is_ours else ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The builds of ggml on this machine, in the order of the list.

    Attributes:
        skipped: Name of a provider -> why it is none.
    """

    providers: tuple[Provider, ...]
    skipped: Mapping[str, str]


def find_providers(environ: Mapping[str, str]) -> Found:
    """Looks through the list; an explicit provider is the only one."""
    asked = environ.get(FOLDER_VARIABLE, "").strip()
    if asked:
        folder = Path(asked).expanduser()
        explicit = Provider(name=FOLDER_VARIABLE, folder=folder, is_explicit=True)
        return Found(providers=(explicit,), skipped={})
    found: list[Provider] = []
    skipped: dict[str, str] = {}
    built = environ.get(BUILT_VARIABLE, "").strip()
    if built and find_library(Path(built), "base"):
        found.append(Provider(name=BUILT_HERE, folder=Path(built)))
    elif built:
        skipped[BUILT_HERE] = f"there is no libggml-base in {built}"
    for wheel in WHEELS:
        try:
            root = Path(str(distribution(wheel.distribution).locate_file("")))
        except PackageNotFoundError:
            continue
        inside = (root / folder for folder in wheel.folders)
        place = next((folder for folder in inside if find_library(folder, "base")), None)
        if place is not None:
            found.append(Provider(name=wheel.distribution, folder=place))
        else:
            skipped[wheel.distribution] = f"it has no libggml-base in {', '.join(wheel.folders)}"
    return Found(providers=tuple(found), skipped=skipped)


def find_library(folder: Path, part: str) -> Path | None:
    """Returns the file of a part of ggml: "base", "cpu", "vulkan"; "" is the registry.

    Wheel tools append a hash to names: libggml-base-4f0c.so.0.
    """
    stem = f"{_PREFIX}ggml-{part}" if part else f"{_PREFIX}ggml"
    exact = folder / f"{stem}{SUFFIX}"
    if exact.is_file():
        return exact
    if not folder.is_dir():
        return None
    hashed = sorted(
        path
        for path in folder.glob(f"{stem}*")
        if SUFFIX in path.name and _is_hash(path.name[len(stem) :].split(SUFFIX)[0])
    )
    return hashed[0] if hashed else None


def modules(folder: Path) -> dict[str, Path]:
    """Returns the loadable backends of a folder: "cpu-haswell", "vulkan", ... -> file."""
    found = {}
    for path in sorted(folder.glob(f"{_PREFIX}ggml-*")):
        if path.name.endswith((SUFFIX, ".so")):
            name = path.name[len(f"{_PREFIX}ggml-") :].split(".")[0]
            head, dash, tail = name.rpartition("-")
            if _is_hash(dash + tail):
                name = head
            if name != "base":
                found[name] = path
    return found


def _is_hash(text: str) -> bool:
    digits = text.removeprefix("-")
    return text.startswith("-") and len(digits) >= 6 and set(digits) <= set("0123456789abcdef")
