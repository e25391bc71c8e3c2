"""The instruction set levels that processor engines are compiled for.

An engine for instructions that a processor lacks loads without a word and dies with SIGILL in its
first run (IREE 3.13), so the level is in the target, and is checked again at load.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
X86_LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64": frozenset(),
}
"""Level -> what it adds to the next, as /proc/cpuinfo names it; the best first.

Source: the levels of the x86-64 psABI, which LLVM knows as processors of the same names.
"""
_NUMPY_SIGNS: Mapping[str, tuple[frozenset[str], ...]] = {
    # What numpy says where there is no /proc/cpuinfo; older releases do not know the levels.
    "x86-64-v4": (frozenset({"X86_V4"}), frozenset({"AVX512_SKX"})),
    "x86-64-v3": (frozenset({"X86_V3"}), frozenset({"AVX2", "FMA3", "F16C"})),
    "x86-64-v2": (frozenset({"X86_V2"}), frozenset({"SSE42", "POPCNT"})),
    "x86-64": (frozenset(),),
}


def levels_of_this_cpu() -> tuple[str, ...]:
    """Returns the levels that this processor runs, the best first; elsewhere than on x86, one."""
    machine = platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    if machine != "x86_64":
        return (machine,)
    flags = _linux_flags()
    return levels_from_flags(flags) if flags else _levels_from_numpy()


def levels_from_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Returns the levels of a processor with these flags of /proc/cpuinfo, the best first."""
    have, found = frozenset(flags), []
    for level, needed in reversed(tuple(X86_LEVELS.items())):
        if not needed <= have:
            break
        found.append(level)
    return tuple(reversed(found))


def llvm_cpu(level: str) -> str:
    """Returns the processor that LLVM is told to compile for."""
    return level if level in X86_LEVELS else "generic"


def _linux_flags() -> frozenset[str]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _levels_from_numpy() -> tuple[str, ...]:
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        with suppress(ImportError, AttributeError):
            table = importlib.import_module(module).__cpu_features__
            have = frozenset(name for name, is_there in table.items() if is_there)
            return tuple(
                level for level, signs in _NUMPY_SIGNS.items() if any(one <= have for one in signs)
            )
    return ("x86-64",)
