"""Whether this machine can build a variant: looked at before anything is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.env.room import free_bytes, size_in_words
from sdkit_dispatch.env.states import platform_name
from sdkit_dispatch.errors import VendorEnvError
from sdkit_dispatch.native.recipe import Need, Recipe, Variant

VERSION_TIMEOUT_S = 60
_VARIABLE = re.compile(r"\$\{([^}]+)\}|\$(\w+)")
_VERSION = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A need that is met.

    Attributes:
        path: Of the program or file.
        words: The line in which a program gives its version; empty for a file.
    """

    path: Path
    words: str = ""


def check_machine(recipe: Recipe, name: str, *, vendor: str, folder: Path) -> dict[str, Found]:
    """Returns where everything is that a variant needs.

    Args:
        recipe: The recipe.
        name: Of the variant.
        vendor: Whose it is, for the message.
        folder: On the disk that the build will use; need not exist yet.

    Raises:
        ConfigError: There is no such variant.
        VendorEnvError: Names everything that is missing or too old, and how to get it.
    """
    variant = recipe.variant(name)
    here = platform_name()
    if variant.platforms and here not in variant.platforms:
        raise VendorEnvError(
            f"{vendor} with {name} is built on {', '.join(variant.platforms)}; this is {here}",
            f"take another of {', '.join(recipe.variants)}",
        )
    found: dict[str, Found] = {}
    problems: list[str] = []
    for one in variant.needs:
        need = recipe.needs[one]
        answer = find_need(need, os.environ)
        if answer is None:
            problems.append(f"{one} is not found")
        elif too_old(answer.words, need.oldest):
            problems.append(f"{one} {need.oldest} is needed, this is {answer.words}")
        else:
            found[one] = answer
    free, needed = free_bytes(folder), variant.disk_mb * 10**6
    if free < needed:
        problems.append(
            f"about {size_in_words(needed)} are needed on the disk of {folder}, "
            f"{size_in_words(free)} are free"
        )
    if problems:
        raise VendorEnvError(
            f"{vendor} cannot be built with {name} here: {'; '.join(problems)}",
            _hint(variant, here) if len(found) < len(variant.needs) else "free some space there",
        )
    return found


def find_need(need: Need, environ: Mapping[str, str]) -> Found | None:
    """Returns where a need is met, or None."""
    places = [place for text in need.places if (place := _expanded(text, environ)) is not None]
    for name in need.files:
        for place in places:
            if (place / name).exists():
                return Found(path=place / name)
    extra = need.windows_programs if sys.platform == "win32" else ()
    given = [environ.get(name, "").strip() for name in need.variables]
    # PATH first: it is what the user changes to choose among several.
    for program in [*filter(None, given), *need.programs, *extra]:
        for folder in (None, *map(str, places)):
            path = shutil.which(program, path=folder)
            if path:
                return Found(path=Path(path), words=_version_words(path))
    return None


def too_old(words: str, oldest: str) -> bool:
    """Returns whether the version in the words is older; False where there is none."""
    found = _VERSION.search(words)
    return bool(oldest and found) and _numbers(found[0] if found else "") < _numbers(oldest)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _expanded(text: str, environ: Mapping[str, str]) -> Path | None:
    names = [match[1] or match[2] for match in _VARIABLE.finditer(text)]
    if not all(environ.get(name) for name in names):
        return None
    return Path(_VARIABLE.sub(lambda match: environ[match[1] or match[2]], text))


def _version_words(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=False,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    # nvcc gives its version in its fourth line.
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    versioned = [line for line in lines if _VERSION.search(line)]
    return (versioned or lines or [""])[0]


def _hint(variant: Variant, here: str) -> str:
    return variant.hints.get(here.partition("-")[0], "install what is missing")
