"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import ConfigError


@contextmanager
def whole_folder(place: Path, *, mark: str, may_replace: bool) -> Iterator[Path]:
    """Gives an empty folder that takes the place of `place` once it was filled without an error.

    Args:
        place: A folder that is empty or not there.
        mark: A file that the caller writes into the folder: by it, it is known again.
        may_replace: Whether `place` may hold files, if `mark` is among them.

    Raises:
        ConfigError: `place` is not free, or cannot be written.
    """
    place = Path(os.path.realpath(place.expanduser()))
    require_free(place, mark=mark, may_replace=may_replace)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name[:100]}-"))
    except OSError as error:
        raise _not_writable(place, error) from error
    try:
        new = workshop / "new"
        new.mkdir()
        yield new
        _move(new, place, workshop / "old")
    except OSError as error:
        raise _not_writable(place, error) from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def require_free(place: Path, *, mark: str, may_replace: bool) -> None:
    """Refuses a place that a new folder must not take.

    Raises:
        ConfigError: It is a file, or holds files of others, or must not be replaced.
    """
    try:
        names = sorted(path.name for path in place.expanduser().iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_writable(place, error) from error
    if names and mark not in names:
        raise ConfigError(
            f"'{place}' is not empty: it holds {names[0]}"
            + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            "name a folder that is empty or not there",
        )
    if names and not may_replace:
        raise ConfigError(
            f"'{place}' was written before", "add --force to replace it, or name another folder"
        )


def _move(new: Path, place: Path, old: Path) -> None:
    """Renames `new` to `place`; what was there comes back if that fails."""
    with suppress(FileNotFoundError):
        os.replace(place, old)
    try:
        os.replace(new, place)
    except OSError:
        with suppress(FileNotFoundError):
            os.replace(old, place)
        raise


def _not_writable(place: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"'{place}' cannot be written: {error.strerror or error}", "name another folder"
    )
