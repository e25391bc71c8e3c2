"""Where libggml may be: an ordered list of folders, each a complete build.

Modules of different builds never mix: a module binds to the libggml-base beside it. So a provider
is one folder, and everything is loaded from it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "SDKIT_GGML_DIR"
BUILT_VARIABLE = "SDKIT_GGML_BUILT_DIR"
"""Set by whoever starts a worker, where a build of ours is in the cache."""

WHEELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Distribution, import name, folders inside; those with backends (CPU variants, Vulkan) first.
    ("transcribe-cpp-native", "transcribe_cpp_native", ("_native",)),
    ("libggml-python", "libggml", ("lib64", "lib", "bin")),
)

_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
_PREFIX = "" if sys.platform == "win32" else "lib"
SUFFIX = _SUFFIXES.get(sys.platform, ".so")


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A folder with a build of ggml.

    Attributes:
        name: "SDKIT_GGML_DIR", or the distribution that brought it.
        is_explicit: The user named it: no other may take its place.
    """

    name: str
    folder: Path
    is_explicit: bool = False


def providers(environ: Mapping[str, str]) -> Iterator[Provider]:
    """Yields the builds of ggml on this machine, best first; an explicit one is the only one."""
    asked = environ.get(FOLDER_VARIABLE, "").strip()
    if asked:
        yield Provider(name=FOLDER_VARIABLE, folder=Path(asked).expanduser(), is_explicit=True)
        return
    built = environ.get(BUILT_VARIABLE, "").strip()
    if built and find_library(Path(built), "base"):
        yield Provider(name="built here", folder=Path(built))
    for distribution, module, folders in WHEELS:
        spec = importlib.util.find_spec(module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for inside in folders:
                folder = Path(root) / inside
                if find_library(folder, "base"):
                    yield Provider(name=distribution, folder=folder)
                    break


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
            if name != "base" and not name.startswith("base-"):
                found[name] = path
    return found


def _is_hash(text: str) -> bool:
    digits = text.removeprefix("-")
    return text.startswith("-") and len(digits) >= 6 and set(digits) <= set("0123456789abcdef")
