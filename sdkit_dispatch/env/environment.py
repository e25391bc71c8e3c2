"""Which Python serves a vendor: of its managed environment, the current one, or a given one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sdkit_dispatch.contract import Rejection, VendorSpec
from sdkit_dispatch.env.installed import read_installed, search_path_of, unmet, version_of
from sdkit_dispatch.env.vendors import normal_name, requirements_of
from sdkit_dispatch.errors import VendorEnvError

POINTER = "current.json"
POINTER_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python that has a vendor's runtime.

    Attributes:
        python: The executable to start; never resolved, a venv is found through its link.
        packages: The vendor's runtime packages -> version.
        fingerprint: Changes when any distribution of the runtime, or what it needs, changes.
        folder: Of the environment.
        variant: Which build of the runtime it holds, as `VendorSpec.variant` has it.
    """

    vendor: str
    kind: Literal["managed", "current", "path"]
    python: Path
    packages: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    folder: Path | None = None
    variant: str = ""

    @property
    def is_isolated(self) -> bool:
        """True if its Python must not see PYTHONPATH and the user's site-packages."""
        return self.kind != "current"


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """What `current.json` in a vendor's folder says; it is written last, and at once.

    Attributes:
        folder: Of the environment.
        search_path: Where its Python looks for packages.
        size_bytes: What it took on disk when it was made.
        variant: Which build of the runtime it holds, as `VendorSpec.variant` has it.
    """

    folder: Path
    python: Path
    search_path: tuple[str, ...]
    size_bytes: int
    variant: str = ""


def vendor_folder(vendor: str, home: Path) -> Path:
    """Returns the folder that holds a vendor's managed environments."""
    return home.absolute() / "env" / vendor


def install_hint(spec: VendorSpec) -> str:
    """Returns the command that installs a vendor."""
    return f"sdkit-dispatch vendors install {spec.name}"


def resolve(spec: VendorSpec, *, choice: str = "auto", home: Path) -> Environment | Rejection:
    """Returns the environment that serves a vendor. Reads metadata, starts and imports nothing.

    Whether the runtime in it really works is for the worker's `probe` to say.

    Args:
        spec: The vendor.
        choice: "auto" (the managed one, else the current interpreter), "managed", "current", or
            the path of a Python or of a virtual environment (that Python is asked for its path).
        home: The home folder.
    """
    if choice == "current" or not spec.runtime_packages:
        return current_environment(spec)
    if choice == "managed":
        return managed_environment(spec, home=home)
    if choice != "auto":
        return _given_environment(spec, Path(os.path.expanduser(choice)))
    managed = managed_environment(spec, home=home)
    if isinstance(managed, Environment):
        return managed
    current = current_environment(spec)
    if isinstance(current, Environment):
        return current
    if managed.code != "not-installed":  # it is there, and something is wrong with it
        return managed
    return Rejection(
        vendor=spec.name,
        code="not-installed",
        reason=f"{managed.reason}, and {current.reason}",
        hint=install_hint(spec),
    )


def managed_environment(
    spec: VendorSpec, *, home: Path, pointer_file: Path | None = None
) -> Environment | Rejection:
    """Returns the environment that `install` made, if it is whole and new enough.

    Args:
        spec: The vendor.
        home: The home folder.
        pointer_file: What names the environment, if not the valid `current.json`.
    """
    pointer = read_pointer(spec, home, pointer_file=pointer_file)
    if isinstance(pointer, Rejection):
        return pointer
    if not pointer.python.exists():
        # Also: the Python that it was made with was uninstalled, and the link leads nowhere.
        return _no(spec, "broken", f"its environment has no working Python at {pointer.python}")
    try:
        held = spec.of_variant(pointer.variant)
    except KeyError:
        return _no(
            spec, "broken", f"it has the build '{pointer.variant}' of a runtime that nobody knows"
        )
    served = _served(held, pointer.search_path, requirements_of(held), pointer.folder)
    if isinstance(served, Rejection):
        return served
    return Environment(
        vendor=spec.name,
        kind="managed",
        python=pointer.python,
        packages=served[0],
        fingerprint=served[1],
        folder=pointer.folder,
        variant=held.variant,
    )


def current_environment(spec: VendorSpec) -> Environment | Rejection:
    """Returns the interpreter that runs us, if the vendor's runtime is installed in it."""
    if not sys.executable:
        return _no(spec, "not-installed", "the current program is not a Python that can be started")
    python = Path(sys.executable)
    return _unmanaged(spec, "current", python, search_path=None, folder=Path(sys.prefix))


def read_pointer(
    spec: VendorSpec, home: Path, *, pointer_file: Path | None = None
) -> Pointer | Rejection:
    """Reads which managed environment of a vendor is the valid one."""
    base = vendor_folder(spec.name, home)
    try:
        data = json.loads((pointer_file or base / POINTER).read_text("utf-8"))
        folder = base / str(data["folder"])
        return Pointer(
            folder=folder,
            python=folder / str(data["python"]),
            search_path=tuple(str(folder / entry) for entry in data["search_path"]),
            size_bytes=int(data["size_bytes"]),
            variant=str(data.get("variant", spec.variant)),
        )
    except FileNotFoundError:
        return _no(spec, "not-installed", f"{spec.name} has no environment in {base}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _no(spec, "broken", f"{base / POINTER} cannot be read: {error}")


def _given_environment(spec: VendorSpec, path: Path) -> Environment | Rejection:
    names = ("bin/python", "Scripts/python.exe", "python.exe")
    python = path.absolute()
    if path.is_dir():
        candidates = [path.absolute() / name for name in names]
        found = [candidate for candidate in candidates if candidate.exists()]
        if not found:
            return _no(spec, "no-python", f"there is no Python in the folder {path}", "--env auto")
        python = found[0]
    try:
        search_path = search_path_of(python)
    except VendorEnvError as error:
        return _no(spec, "no-python", error.message, "--env auto")
    return _unmanaged(spec, "path", python, search_path=search_path, folder=python.parent.parent)


def _unmanaged(
    spec: VendorSpec,
    kind: Literal["current", "path"],
    python: Path,
    *,
    search_path: Sequence[str] | None,
    folder: Path,
) -> Environment | Rejection:
    """Returns an environment that a user made, with whichever build of the runtime it holds."""
    refusals: list[Rejection] = []
    for name in (spec.variant, *spec.variants):
        held = spec.of_variant(name)
        requirements = requirements_of(held, runtime_only=kind == "current")
        served = _served(held, search_path, requirements, folder)
        if not isinstance(served, Rejection):
            return Environment(
                vendor=spec.name,
                kind=kind,
                python=python,
                packages=served[0],
                fingerprint=served[1],
                folder=folder,
                variant=name,
            )
        refusals.append(served)
    return refusals[0]


def _served(
    spec: VendorSpec,
    search_path: Sequence[str] | None,
    requirements: Sequence[str],
    folder: Path,
) -> tuple[dict[str, str], str] | Rejection:
    """Returns the runtime packages and the fingerprint, or why the environment does not do."""
    for name in spec.conflicts:
        version = version_of(name, search_path)
        if version is not None:
            return _no(
                spec,
                "conflict",
                f"{folder} has {name} {version}, which overwrites files of "
                f"{' and '.join(spec.runtime_packages)}",
            )
    installed = read_installed(spec.runtime_packages, search_path)
    versions = {
        name: installed.versions.get(normal_name(name), "") for name in spec.runtime_packages
    }
    missing = [name for name, version in versions.items() if not version]
    is_managed = search_path is not None
    if missing:
        code = "broken" if is_managed else "not-installed"
        return _no(spec, code, f"{', '.join(missing)} is not installed in {folder}")
    problems = unmet(requirements, search_path)
    if problems:
        return _no(spec, "outdated", f"in {folder}, {'; '.join(problems)}")
    return versions, installed.fingerprint


def _no(spec: VendorSpec, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=spec.name, code=code, reason=reason, hint=hint or install_hint(spec))
