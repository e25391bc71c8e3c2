"""Where an engine store keeps what, which layout it has, and who may write to it.

<home>/engines/LAYOUT                  the number of this layout; a store without it has 1
<home>/engines/ab/<key>/               manifest.json and the vendor's files; never modified
<home>/merged/<key>/                   manifest.json and a pipeline with LoRAs in its weights
<home>/locks/<key>.lock                one builder a key; the operating system frees it
<home>/tmp/<key>-<random>/             an engine being built; swept by the next builder
<home>/references/                     what engines are compared with
<home>/scratch/                        memos that may be lost at any time
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .errors import CacheError
from .whole_file import write_whole

LAYOUT = 1
"""Raised when a file of the store moves. A store of another layout is neither read nor written."""
LAYOUT_FILE = "LAYOUT"
MAX_LAYOUT_BYTES = 64
FOLDERS = ("engines", "merged", "locks", "tmp", "references", "scratch")
PRIVATE = 0o700
OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH
UNWRITABLE = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT}
)
"""What a full disk, a read-only or missing home, or a quota says: nobody's mistake, so engines are
built elsewhere. A file in place of a folder is a mistake, and an error."""


def engines_folder(home: Path) -> Path:
    """Returns the folder of all engines of a home."""
    return home / "engines"


def engine_folder(home: Path, key: str) -> Path:
    """Returns where the engine with this key is, or would be."""
    return home / "engines" / key[:2] / key


def merged_folder(home: Path) -> Path:
    """Returns the folder of all pipelines with LoRAs in their weights."""
    return home / "merged"


def layout_problem(home: Path) -> str:
    """Returns why the engines of a home cannot be used by this version; empty if they can."""
    path = engines_folder(home) / LAYOUT_FILE
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_LAYOUT_BYTES).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""  # none yet, or of the time before the file
    except OSError as error:
        return f"the engine store in '{home}' cannot be read: {error.strerror or error}"
    if text == str(LAYOUT):
        return ""
    return (
        f"the engine store in '{home}' has the layout {text!r}, this version knows {LAYOUT}; "
        "it is left alone"
    )


def prepare(home: Path) -> None:
    """Makes the folders of a store, for its owner alone, and writes which layout it has.

    Raises:
        CacheError: It has another layout.
        OSError: It cannot be written.
    """
    problem = layout_problem(home)
    if problem:
        raise store_error(problem)
    for folder in (home, *(home / name for name in FOLDERS)):
        if not folder.is_dir():
            folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        elif folder != home:  # what others write there, we would believe
            close_to_others(folder)
    path = engines_folder(home) / LAYOUT_FILE
    if not path.exists():
        write_whole(path, f"{LAYOUT}\n".encode())


def make_private(folder: Path) -> None:
    """Takes from everybody but the owner the right to write below `folder`. POSIX only."""
    for path in (folder, *folder.rglob("*")):
        close_to_others(path)


def close_to_others(path: Path) -> None:
    """Takes from everybody but the owner the right to write a file or folder of ours. POSIX."""
    found = path.lstat()
    is_open = found.st_mode & OTHERS_CAN_WRITE and not stat.S_ISLNK(found.st_mode)
    if os.name != "nt" and is_open and found.st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_CAN_WRITE)


def intruder(folder: Path) -> tuple[str, str]:
    """Returns who else could have written an engine, and what would help; empty if nobody.

    An engine is code that a vendor's runtime executes: one that others can change, or that another
    user brought (root excepted), is not loaded. Windows has no such modes: there nothing is said.
    """
    if os.name == "nt":
        return "", ""
    trusted = {0, os.geteuid()}
    for path, found in _stats(folder):
        if found.st_uid not in trusted:
            words = f"'{path}' belongs to the user {found.st_uid}, not to you or root"
            return words, f"sdkit-dispatch cache remove {folder.name[:12]}"
        if found.st_mode & OTHERS_CAN_WRITE and not stat.S_ISLNK(found.st_mode):
            mode = stat.S_IMODE(found.st_mode)
            words = f"'{path}' can be written by other users (mode {mode:o})"
            return words, f"chmod -R go-w '{folder}'"
    return "", ""


def _stats(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in (folder, *sorted(folder.rglob("*"))):
        with suppress(FileNotFoundError):
            yield path, path.lstat()


def store_error(message: str) -> CacheError:
    """Returns the error of a store that cannot be used, whatever the vendor."""
    error = CacheError(message, "free space there, or choose another folder with --home")
    error.concerns_store = True
    return error


def as_store_error(error: OSError, home: Path) -> CacheError:
    """Names a disk that is full, read-only or gone."""
    where = f" ('{error.filename}')" if error.filename else ""
    return store_error(
        f"the engine store in '{home}' cannot be used: {error.strerror or error}{where}"
    )
