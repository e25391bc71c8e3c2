"""Loads one build of ggml: its base, the best CPU variant and, when asked, its GPU backends."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from sdkit_ggml.runtime.binding import LOG_CALLBACK, SCORE, Library
from sdkit_ggml.runtime.providers import Provider, find_library, modules, providers

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 20), (0, 27)
"""Versions of ggml whose API is the one in the binding's table; newer ones are tried, and the self
test of the adapter decides."""
GPU_BACKENDS = ("vulkan", "cuda", "hip", "metal", "sycl")
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
        is_exact: Whether GPUs were opened to compute in float32; None before one is opened.
    """

    library: Library
    provider: Provider
    version: str
    cpu_variant: str = ""
    backends: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    is_exact: bool | None = None
    _has_gpus: bool = False

    @property
    def name(self) -> str:
        """What engines are made for and planned with: "ggml 0.26.0"."""
        return f"ggml {self.version}"

    def open_gpus(self, *, is_exact: bool) -> None:
        """Decides how GPUs compute, if that is not decided yet: ggml looks as a device opens.

        Half precision gives 1e-3 where float32 gives 1e-6, and is what GPUs are fast in.
        """
        if self.is_exact is None:
            self.is_exact = is_exact
            if is_exact:
                os.environ.setdefault("GGML_VK_DISABLE_F16", "1")
                os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

    def load_gpu_backends(self) -> None:
        """Loads the GPU backends that the build has; one without its driver is left out.

        No device is opened by it.
        """
        if self._has_gpus:
            return
        self._has_gpus = True
        found = modules(self.provider.folder)
        for name in GPU_BACKENDS:
            path = next(
                (found[key] for key in found if key == name or key.startswith(f"{name}-")), None
            )
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
    """Returns the build of ggml of this process; loads the first that works.

    Raises:
        LoadError: None works.
    """
    if not _loaded:
        _loaded["runtime"] = _load_first()
    return _loaded["runtime"]


def _load_first() -> Runtime:
    # ggml would start a debugger on itself when it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    refusals = []
    for provider in providers(os.environ):
        try:
            return _load(provider)
        except (OSError, AttributeError, ValueError) as error:
            refusals.append(f"{provider.name} in {provider.folder}: {error}")
    raise LoadError("; ".join(refusals) or "no build of ggml is installed")


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
        raise ValueError("it is older than ggml 0.9")
    base.ggml_version.restype = ctypes.c_char_p
    text = str(base.ggml_version().decode())
    major, minor = (int(part) for part in text.split("-")[0].split(".")[:2])
    if (major, minor) < OLDEST:
        raise ValueError(f"it is ggml {text}; {'.'.join(map(str, OLDEST))} or newer is needed")
    if (major, minor) > NEWEST:
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
