"""Loads one build of ggml: its base, the best CPU variant and, when asked, its GPU backends."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sdkit_ggml.runtime.binding import LOG_CALLBACK, SCORE, Library
from sdkit_ggml.runtime.devices import OfferedDevice
from sdkit_ggml.runtime.examination import (
    GPU_BACKENDS,
    NEWEST,
    rank,
    version_fault,
    version_of,
)
from sdkit_ggml.runtime.providers import Provider, find_library, find_providers, modules

logger = logging.getLogger(__name__)

_EXACT: Mapping[str, Mapping[str, str]] = {
    "Vulkan": {"GGML_VK_DISABLE_F16": "1"},
    "CUDA": {"NVIDIA_TF32_OVERRIDE": "0"},
}
"""Backend -> variables that make it compute in float32; the caller's own values stand."""
_READ_PER_DEVICE = frozenset({"Vulkan"})
"""Backends that look at them as each device opens; of others one answer serves the process."""
_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}


class LoadError(Exception):
    """No build of ggml can be used; the message lists every one and why."""


@dataclass
class Runtime:
    """A loaded build of ggml.

    Attributes:
        version: "0.26.0".
        cpu_variant: "haswell", ...; empty where the build has one only.
        backends: What is loaded, the CPU included.
        failures: GPU backend -> why it did not load.
        notes: Sentences on the choice of this build: why it, and what is wrong with others.
        are_exact: GPU, or the backend of GPUs that share it -> whether it was opened to compute in
            float32.
    """

    library: Library
    provider: Provider
    version: str
    cpu_variant: str = ""
    backends: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    are_exact: dict[str, bool] = field(default_factory=dict)
    _has_gpus: bool = False
    _variables: set[str] = field(default_factory=set)
    """Those of the process that are ours to take back."""

    @property
    def name(self) -> str:
        """What engines are made for and planned with: "ggml 0.26.0".

        A build of ours is named, too: it may be of the same version as another.
        """
        own = f" (build {self.provider.build_id})" if self.provider.build_id else ""
        return f"ggml {self.version}{own}"

    def open_gpu(self, device: OfferedDevice, *, is_exact: bool) -> bool:
        """Decides how a GPU computes, if it is not open yet; returns whether that is in float32.

        Half precision gives 1e-3 where float32 gives 1e-6, and is what GPUs are fast in.
        """
        place = device.name if device.backend in _READ_PER_DEVICE else device.backend
        if place not in self.are_exact:
            self.are_exact[place] = is_exact
            for name, value in _EXACT.get(device.backend, {}).items():
                if is_exact and name not in os.environ:
                    os.environ[name] = value
                    self._variables.add(name)
                elif not is_exact and name in self._variables:
                    del os.environ[name]
                    self._variables.remove(name)
        return self.are_exact[place]

    def load_gpu_backends(self) -> None:
        """Loads the GPU backends that the build has; one without its driver is left out.

        No device is opened by it.
        """
        if self._has_gpus:
            return
        self._has_gpus = True
        found = modules(self.provider.folder)
        for name in GPU_BACKENDS:
            path = found.get(name)
            if path is None:
                continue
            if self.library.ggml_backend_load(os.fsencode(path)):
                self.backends.append(name)
            else:
                self.failures[name] = f"{path.name} does not load: its driver may be missing"


_loaded: dict[str, Runtime] = {}
"""The one build of this process: two would not go together. Empty or one entry."""
_keep_alive: list[object] = []
"""What C holds pointers to."""


def load_runtime() -> Runtime:
    """Returns the build of ggml of this process; loads the one that serves this machine best.

    Raises:
        LoadError: None works.
    """
    if not _loaded:
        _loaded["runtime"] = _load_first()
    return _loaded["runtime"]


def _load_first() -> Runtime:
    # ggml would start a debugger on itself when it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    found = find_providers(os.environ)
    ranking = rank(found.providers)
    refusals = {**found.skipped, **ranking.skipped}
    if not ranking.providers:
        words = [f"{name}: {why}" for name, why in refusals.items()]
        raise LoadError("; ".join(words) or "no build of ggml is installed")
    provider = ranking.providers[0]
    try:
        runtime = _load(provider)
    except (OSError, AttributeError, ValueError) as error:
        # None of the others: what is loaded of this one would take the place of their libraries.
        words = [
            f"{provider.name} in {provider.folder}: {error}",
            *(f"{name}: {why}" for name, why in refusals.items()),
        ]
        raise LoadError("; ".join(words)) from error
    skipped = [f"{name} is not used: {why}" for name, why in refusals.items()]
    runtime.notes = (*([ranking.reason] if ranking.reason else []), *skipped)
    return runtime


def _load(provider: Provider) -> Runtime:
    folder = provider.folder
    base_path, registry_path = find_library(folder, "base"), find_library(folder, "")
    if base_path is None or registry_path is None:
        raise ValueError(f"no libggml-base and libggml in {folder}")
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))
    base = ctypes.CDLL(str(base_path))
    version = _version(base)
    has_variants = find_library(folder, "cpu") is None
    if not has_variants:
        # Linked into the registry library, which needs it to be there.
        ctypes.CDLL(str(find_library(folder, "cpu")))
    library = Library(base, ctypes.CDLL(str(registry_path)))
    callback = LOG_CALLBACK(_log)
    library.ggml_log_set(callback, None)
    _keep_alive.extend((library, callback))
    runtime = Runtime(library=library, provider=provider, version=version)
    if not library.ggml_backend_reg_by_name(b"CPU"):
        _load_cpu(runtime)
    runtime.backends.append("cpu")
    return runtime


def _version(base: ctypes.CDLL) -> str:
    if not hasattr(base, "ggml_version"):
        raise ValueError(version_fault(""))
    base.ggml_version.restype = ctypes.c_char_p
    text = str(base.ggml_version().decode())
    if fault := version_fault(text):
        raise ValueError(fault)
    if version_of(text) > NEWEST:
        logger.warning("ggml %s is newer than any that was tried", text)
    return text


def _load_cpu(runtime: Runtime) -> None:
    """Loads the CPU variant with the highest score, as ggml's own loader would."""
    found = modules(runtime.provider.folder)
    scored: list[tuple[int, str, Path]] = []
    for name, path in found.items():
        if name.startswith("cpu-") or name == "cpu":
            scored.append((_score(path), name, path))
    usable = [one for one in scored if one[0] > 0]
    if not usable:
        raise ValueError(f"none of its CPU variants suits: {', '.join(n for _, n, _ in scored)}")
    _, name, path = max(usable)
    if not runtime.library.ggml_backend_load(os.fsencode(path)):
        raise ValueError(f"{path.name} does not load")
    runtime.cpu_variant = name.removeprefix("cpu").removeprefix("-")


def _score(path: Path) -> int:
    try:
        module = ctypes.CDLL(str(path))
    except OSError:
        return 0
    if not hasattr(module, "ggml_backend_score"):
        return 1
    return int(SCORE(("ggml_backend_score", module))())


def _log(level: int, text: bytes, _data: object) -> None:
    words = text.decode(errors="replace").strip()
    if words:
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", words)
