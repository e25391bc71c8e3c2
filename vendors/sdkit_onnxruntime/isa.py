"""The instruction set that ONNX Runtime's processor-specific optimisations depend on."""

from __future__ import annotations

import importlib
import platform

_MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
_LEVELS = {
    # numpy's name of the feature -> our word for the level; the first that is there counts.
    # With AVX-512 the library blocks 16 channels of a convolution together, else 8, and the
    # blocked weights are part of an optimised model.
    "x86_64": {"AVX512F": "avx512f", "AVX2": "avx2"},
    # Half-precision kernels are chosen where the processor has the arithmetic.
    "arm64": {"ASIMDHP": "asimdhp"},
}


def isa_of_this_cpu() -> str:
    """Returns "x86_64+avx2", "x86_64+avx512f", "arm64", ..."""
    machine = platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    features = _cpu_features()
    for feature, level in _LEVELS.get(machine, {}).items():
        if features.get(feature):
            return f"{machine}+{level}"
    return machine


def _cpu_features() -> dict[str, bool]:
    # What `numpy.show_runtime` prints: the one table that has the same names on every system.
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            return dict(importlib.import_module(module).__cpu_features__)
        except (ImportError, AttributeError):
            continue
    return {}
