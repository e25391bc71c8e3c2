"""What is installed in an environment, read from its metadata; nothing of it is imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from sdkit_dispatch.env.vendors import normal_name
from sdkit_dispatch.errors import VendorEnvError

QUESTION_TIMEOUT_S = 60
"""For a Python that says where it looks for packages; a cold disk takes seconds."""

_QUESTION = "import json, sys; print(json.dumps(sys.path))"


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The distributions among those asked for that an environment has, and what they need.

    Attributes:
        versions: Normalised name -> version.
        fingerprint: Changes whenever one of them changes, be it by one file.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""


def search_path_of(python: Path) -> tuple[str, ...]:
    """Returns where another Python looks for packages, without the variables of the caller.

    Raises:
        VendorEnvError: It cannot be run.
    """
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=QUESTION_TIMEOUT_S,
            check=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        ).stdout
        return tuple(json.loads(answer))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise VendorEnvError(f"{python} cannot be run as a Python: {error}") from error


def read_installed(names: Iterable[str], search_path: Sequence[str] | None = None) -> Installed:
    """Returns those of `names` that are installed, with all that they require.

    Args:
        names: Distributions.
        search_path: Of the environment; of this process by default.
    """
    path = list(sys.path if search_path is None else search_path)
    found: dict[str, Distribution] = {}
    waiting = [normal_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        distribution = _find(name, path)
        if distribution is not None:
            found[name] = distribution
            waiting += _required_names(distribution)
    digest = hashlib.sha256()
    for name in sorted(found):
        # RECORD holds the digest of every file: a rebuilt wheel of the same version differs.
        record = found[name].read_text("RECORD") or ""
        digest.update(f"{name}=={found[name].version}\n{record}\n".encode())
    return Installed(
        versions={name: found[name].version for name in sorted(found)},
        fingerprint=digest.hexdigest(),
    )


def version_of(name: str, search_path: Sequence[str] | None = None) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    distribution = _find(normal_name(name), list(sys.path if search_path is None else search_path))
    return None if distribution is None else distribution.version


def unmet(requirements: Iterable[str], search_path: Sequence[str] | None = None) -> list[str]:
    """Returns a few words for each requirement that what is installed does not meet."""
    from packaging.requirements import Requirement

    problems = []
    for line in requirements:
        requirement = Requirement(line)
        version = version_of(requirement.name, search_path)
        if version is None:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return problems


def _find(name: str, path: list[str]) -> Distribution | None:
    for distribution in distributions(name=name, path=[folder or os.curdir for folder in path]):
        try:
            if distribution.version:
                return distribution
        except (KeyError, TypeError):  # a folder that a killed uninstall left behind
            continue
    return None


def _required_names(distribution: Distribution) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    names = []
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.append(normal_name(requirement.name))
    return names
