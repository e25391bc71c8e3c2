"""A profile: WHAT to build. It changes engine keys; its name never does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sdkit_dispatch.config import fields
from sdkit_dispatch.config.folders import home_folder, shipped_folder
from sdkit_dispatch.config.strict_yaml import YamlFile, nearest, read_yaml
from sdkit_dispatch.contract import SCHEDULERS, Precision
from sdkit_dispatch.errors import ConfigError

DEFAULT_PROFILE = "default"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What to build, and what to generate with it unless the caller says otherwise.

    None means "auto": taken from the pipeline's own files, or the vendor's best.

    Attributes:
        options: Vendor -> that vendor's own options, decoded by the vendor in its worker (`Any`:
            each vendor owns its values).
        source: The file it came from; "" for one made in Python.
    """

    name: str = DEFAULT_PROFILE
    width_px: int | None = None
    height_px: int | None = None
    batch: int | None = None
    precision: Precision | None = None
    scheduler: str | None = None
    steps: int | None = None
    guidance: float | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = field(default="", compare=False)


_SIZE_PX = fields.auto_or(fields.integer(8, 8192, multiple_of=8))

PROFILE_FIELDS: Mapping[str, fields.Check] = {
    "name": fields.text,
    "width_px": _SIZE_PX,
    "height_px": _SIZE_PX,
    "batch": fields.auto_or(fields.integer(1, 64)),
    "precision": fields.auto_or(fields.one_of(*get_args(Precision))),
    "scheduler": fields.auto_or(fields.one_of(*SCHEDULERS)),
    "steps": fields.auto_or(fields.integer(1, 1000)),
    "guidance": fields.auto_or(fields.number(0.0, 100.0)),
    "options": fields.vendor_options,
}


def available_profiles(*, home: Path | None = None) -> dict[str, Path]:
    """Returns name -> file of every profile; the user's own hide shipped ones of that name."""
    folders = (shipped_folder("profiles"), (home or home_folder()) / "profiles")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def load_profile(name_or_path: str | Path, *, home: Path | None = None) -> Profile:
    """Returns the profile of that name ("sd15"), or the one in that file ("./mine.yaml").

    Raises:
        ConfigError: There is no such profile, or the file is wrong; says the line and the key.
    """
    return profile_from_yaml(read_yaml(_find(name_or_path, home)))


def profile_from_yaml(file: YamlFile) -> Profile:
    """Returns the profile that a file describes.

    Raises:
        ConfigError: A key is unknown or has a wrong value.
    """
    values = {"name": file.path.stem, **checked(file, PROFILE_FIELDS)}
    return Profile(**values, source=str(file.path))


def checked(file: YamlFile, known: Mapping[str, fields.Check]) -> dict[str, Any]:
    """Returns the values of a file, each checked and converted by its field.

    Raises:
        ConfigError: A key is unknown or has a wrong value; says the line and the key.
    """
    values: dict[str, Any] = {}  # Any: as the fields return them
    for key, value in file.data.items():
        if key not in known:
            raise ConfigError(f"{file.where((key,))}: unknown key", nearest(key, known))
        try:
            values[key] = known[key](value)
        except ValueError as error:
            raise ConfigError(
                f"{file.where((key,))}: is {value!r}, but must be {error}",
                f"edit line {file.lines.get((key,), 1)} of {file.path}",
            ) from None
    return values


def _find(name_or_path: str | Path, home: Path | None) -> Path:
    asked = str(name_or_path)
    path = Path(os.path.expanduser(name_or_path))
    if path.suffix in (".yaml", ".yml") or path.name != asked:
        return path
    found = available_profiles(home=home)
    if asked not in found:
        raise ConfigError(
            f"there is no profile {asked!r}; there are {', '.join(sorted(found)) or 'none'}",
            nearest(asked, found),
        )
    return found[asked]
