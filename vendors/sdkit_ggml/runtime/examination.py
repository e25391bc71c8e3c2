"""Which of several builds of ggml serves this machine best, found out without loading any."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdkit_ggml.runtime.binding import BASE, REGISTRY_FUNCTIONS
from sdkit_ggml.runtime.providers import Provider, find_library, modules

OLDEST, NEWEST = (0, 20), (0, 27)
"""Versions of ggml whose API is the one in the binding's table; newer ones are tried, and the self
test of the adapter decides."""
MAKERS_BACKENDS: Mapping[str, str] = {
    "cuda": "NVIDIA",
    "hip": "AMD",
    "metal": "Apple",
    "sycl": "Intel",
}
"""Backend -> whose processors it is made for."""
GPU_BACKENDS = (*MAKERS_BACKENDS, "vulkan")
TRIAL_TIMEOUT_S = 60
"""The first use of a GPU driver takes seconds, more on a cold disk."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What a build of ggml says of itself.

    Attributes:
        devices: GPU backend that loads -> how many devices it offers.
        fault: Why the build cannot be used; empty if it can.
        unloaded: GPU backend that does not load -> why, such as the library that it lacks.
    """

    version: str = ""
    devices: Mapping[str, int] = field(default_factory=dict)
    fault: str = ""
    unloaded: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> int:
        """Of a backend by a GPU's maker that offers one, before Vulkan, before the processor."""
        offering = [name for name, count in self.devices.items() if count]
        if any(name in MAKERS_BACKENDS for name in offering):
            return 0
        return 1 if offering else 2


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Builds of ggml, best first.

    Attributes:
        skipped: Name of a provider, or "cuda of" it -> what is wrong with it.
        reason: Why the first is first, where the order of the list is not the reason.
    """

    providers: tuple[Provider, ...]
    skipped: Mapping[str, str]
    reason: str = ""


def rank(
    providers: Sequence[Provider], *, examine: Callable[[Provider], Examined] | None = None
) -> Ranking:
    """Orders builds by the GPUs that they drive here; the order of the list where that is equal.

    A build that has a GPU's maker's own backend comes before one with Vulkan, and that before one
    for the processor only: else a build that lacks it would hide a GPU from us.
    """
    if len(providers) < 2:  # nothing to choose, and nothing it could be mixed with
        return Ranking(providers=tuple(providers), skipped={})
    with ThreadPoolExecutor() as pool:
        answers = pool.map(examine or examine_build, providers)
        examined = {one.name: answer for one, answer in zip(providers, answers, strict=True)}
    good = [one for one in providers if not examined[one.name].fault]
    ranked = sorted(good, key=lambda one: examined[one.name].order)
    skipped = {name: one.fault for name, one in examined.items() if one.fault}
    skipped |= {
        f"{backend} of {name}": why
        for name, one in examined.items()
        for backend, why in one.unloaded.items()
    }
    reason = ""
    if ranked and ranked[0] != good[0]:
        first = examined[ranked[0].name]
        backend, count = next((name, n) for name, n in first.devices.items() if n)
        maker = MAKERS_BACKENDS.get(backend)
        whose = f"{backend}, {maker}'s own," if maker else backend
        reason = (
            f"ggml is of {ranked[0].name} and not of {good[0].name}: with {whose} it drives "
            f"{count} GPU{'s' if count > 1 else ''} here"
        )
    return Ranking(providers=tuple(ranked), skipped=skipped, reason=reason)


def examine_build(provider: Provider) -> Examined:
    """Loads a build in another process and asks it; never raises."""
    folder = provider.folder
    parts = {part: find_library(folder, part) for part in ("base", "", "cpu")}
    if parts["base"] is None or parts[""] is None:
        return Examined(fault=f"there are no libggml-base and libggml in {folder}")
    found = modules(folder)
    asked = {name: str(found[name]) for name in GPU_BACKENDS if name in found}
    question = {
        "folder": str(folder),
        "base": str(parts["base"]),
        "registry": str(parts[""]),
        "cpu": str(parts["cpu"] or ""),
        "base_symbols": list(BASE),
        "symbols": list(REGISTRY_FUNCTIONS),
        "modules": asked,
    }
    try:
        return _tried(question, asked)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        fault = _fault(error)
    try:
        # A driver that ends or hangs the process costs the build its GPUs, not the processor.
        examined = _tried({**question, "modules": {}}, {}) if asked else None
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        fault, examined = _fault(error), None
    if examined is None:
        return Examined(fault=f"it does not load: {fault}")
    return replace(examined, unloaded={} if examined.fault else dict.fromkeys(asked, fault))


def _tried(question: Mapping[str, Any], asked: Mapping[str, str]) -> Examined:  # Any: JSON data
    done = subprocess.run(
        [sys.executable, "-I", str(Path(__file__).with_name("trial.py")), json.dumps(question)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=TRIAL_TIMEOUT_S,
        check=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    return judged(json.loads(done.stdout.splitlines()[-1]), asked=asked, words=done.stderr)


def _fault(error: Exception) -> str:
    """Returns why a trial gave no answer, without its command, which is long."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it gives no answer within {TRIAL_TIMEOUT_S} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr or "").strip().splitlines()
        return lines[-1] if lines else f"its process ended with {error.returncode}"
    return str(error) or repr(error)


def judged(answer: Mapping[str, Any], *, asked: Mapping[str, str], words: str = "") -> Examined:
    """Returns what an answer of the trial means.

    Args:
        answer: JSON data (`Any`).
        asked: GPU backend -> file, of those that were tried.
        words: What ggml wrote meanwhile.
    """
    version, missing = str(answer["version"]), list(answer["missing"])
    devices = dict(answer["devices"])
    fault = version_fault(version)
    if not fault and missing:
        fault = f"ggml {version} lacks {', '.join(missing)}"
    unloaded = {
        backend: _why(path, words)
        for backend, path in asked.items()
        if backend not in devices and not fault
    }
    return Examined(version=version, devices=devices, fault=fault, unloaded=unloaded)


def _why(path: str, words: str) -> str:
    """Returns what ggml wrote of a module that it could not load."""
    mark = f"failed to load {path}: "
    said = [line.partition(mark)[2] for line in words.splitlines() if mark in line]
    return said[-1] if said else f"{Path(path).name} does not load"


def version_fault(text: str) -> str:
    """Returns why a version of ggml is none of ours; empty if it will do."""
    if not text:
        return "it is older than ggml 0.9"
    if version_of(text) < OLDEST:
        return f"it is ggml {text}; {'.'.join(map(str, OLDEST))} or newer is needed"
    return ""


def version_of(text: str) -> tuple[int, int]:
    """Returns "0.26.0-dirty" as (0, 26)."""
    major, minor = (int(part) for part in text.split("-")[0].split(".")[:2])
    return major, minor
