"""How a vendor's runtime is built from source: `build.toml` in its package, plain data."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sdkit_dispatch.contract import VendorSpec, record_from_json
from sdkit_dispatch.errors import ConfigError, VendorEnvError

RECIPE_FILE = "build.toml"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source archive of a package.

    Attributes:
        sha256: Of the archive.
        folder: With the CMakeLists.txt, below the archive's one folder.
    """

    package: str
    version: str
    sha256: str
    size_mb: int
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Need:
    """A program or file that a build needs.

    Attributes:
        programs: Names, any of which will do.
        windows_programs: The same, on Windows only.
        variables: Environment variables that may name the program.
        files: Names instead of programs, below one of the places.
        places: Folders beside those of PATH; "$NAME" and "${NAME}" are environment variables, and a
            place whose variable is not set is none.
        oldest: Version; asked with --version.
    """

    programs: tuple[str, ...] = ()
    windows_programs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    oldest: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to build it: `--with NAME`.

    Attributes:
        needs: Names of needs.
        flags: Of CMake, after the recipe's own; "{nvcc}" is where that need was found.
        platform_flags: "linux", "macos", "windows" -> more of them.
        is_native: It may use every instruction of the processor that it is built on, so it is for
            no other.
        must_have: Patterns of files that it must give, beside the recipe's own.
        platforms: Where it can be built; empty for anywhere.
        disk_mb: What the build takes on the disk while it runs.
        hints: "linux", "macos", "windows" -> how to get what it needs.
    """

    needs: tuple[str, ...]
    flags: tuple[str, ...]
    disk_mb: int
    platform_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_native: bool = False
    must_have: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a vendor's runtime is built.

    Attributes:
        variable: Environment variable that tells the vendor's worker of a build's folder.
        only_variable: The same, of a folder that must be used, whatever else there is.
        libraries: Patterns of the files that a build gives.
        must_have: Patterns, each of which must be among them.
        flags: Of CMake: "NAME=VALUE".
    """

    source: Source
    variable: str
    only_variable: str
    libraries: tuple[str, ...]
    needs: Mapping[str, Need]
    variants: Mapping[str, Variant]
    must_have: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def variant(self, name: str) -> Variant:
        """Returns a variant.

        Raises:
            ConfigError: There is none of that name.
        """
        if name not in self.variants:
            raise ConfigError(
                f"--with is '{name}'; it may be {', '.join(self.variants)}", "--with cpu"
            )
        return self.variants[name]


def recipe_of(spec: VendorSpec) -> Recipe:
    """Reads a vendor's recipe; imports nothing of the vendor but its package.

    Raises:
        ConfigError: The vendor has none.
        VendorEnvError: It has one that cannot be read.
    """
    package = spec.adapter.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    files = [Path(place) / RECIPE_FILE for place in places]
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        raise ConfigError(
            f"the vendor '{spec.name}' cannot be built from source: it has no {RECIPE_FILE}",
            f"sdkit-dispatch vendors install {spec.name}",
        )
    try:
        recipe = record_from_json(Recipe, tomllib.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise VendorEnvError(f"{file} cannot be read: {error}") from error
    for name, variant in recipe.variants.items():
        unknown = sorted(set(variant.needs) - set(recipe.needs))
        if unknown:
            raise VendorEnvError(f"{file}: the variant {name} needs {unknown[0]!r}, not defined")
    return recipe
