"""Where our files are: the user's home folder, and the files that ship with the package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sdkit_dispatch.errors import ConfigError

HOME_VARIABLE = "SDKIT_DISPATCH_HOME"

NO_HOME = Path(os.path.abspath(os.sep), "nonexistent", "sdkit-dispatch")
"""Cannot be made by a user without a home folder: engines are built and not kept."""

_PACKAGE = Path(__file__).resolve().parent.parent


def home_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of engines, environments and settings; it need not exist yet.

    Raises:
        ConfigError: `SDKIT_DISPATCH_HOME` names something that is not a folder.
    """
    asked = (os.environ if environ is None else environ).get(HOME_VARIABLE, "").strip()
    if not asked:
        import platformdirs

        # appauthor=False: Windows would put it under a folder of the author's name.
        folder = platformdirs.user_data_path("sdkit-dispatch", appauthor=False)
        # Of a user without a home the ~ stays as it is, and would be made in the current folder.
        return folder if folder.is_absolute() else NO_HOME
    folder = Path(os.path.expanduser(asked)).absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{HOME_VARIABLE} is {asked!r}, which is not a folder", f"unset {HOME_VARIABLE}"
        )
    return folder


def shipped_folder(kind: Literal["profiles", "configs"]) -> Path:
    """Returns the folder of shipped files: inside an installed package, or of a checkout."""
    installed = _PACKAGE / "_data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind
