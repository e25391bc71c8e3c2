"""A plan in memory -> an engine of the runtime, and what its refusal means."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from sdkit_dispatch.errors import CacheError, RunError
from sdkit_tensorrt.builder_log import Lines, Runtime

_DIAGNOSES = {
    # Name in EngineInvalidityDiagnostics -> is the engine at fault?, what it is, what to do.
    "VERSION_MISMATCH": (True, "it was made by another version", ""),
    "MALFORMED_ENGINE": (True, "its file is damaged", ""),
    "UNSUPPORTED_CC": (True, "it was made for another card", ""),
    "INSUFFICIENT_GPU_MEMORY": (
        False,
        "the card has not enough free memory",
        "close other programs, or ask for a smaller image",
    ),
    "OLD_CUDA_DRIVER": (False, "the NVIDIA driver is too old for it", "update the NVIDIA driver"),
    "OLD_CUDA_RUNTIME": (
        False,
        "the CUDA runtime is too old for it",
        "sdkit-dispatch vendors install tensorrt-rtx",
    ),
    "CUDA_ERROR": (False, "the NVIDIA driver fails", "check `nvidia-smi`"),
}


def open_engine(trt: Runtime, runtime: Any, plan: Path, lines: Lines, *, who: str) -> Any:
    """Returns an ICudaEngine (`Any`, as `runtime`: of the bindings). There is a driver.

    Raises:
        CacheError: The engine is at fault: building it again helps.
        RunError: The machine is.
    """
    with plan.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
        if engine is not None:
            return engine
        raise _refusal(trt, runtime, data, plan, lines, who)


def _refusal(
    trt: Runtime, runtime: Any, data: Any, plan: Path, lines: Lines, who: str
) -> CacheError | RunError:
    names = _diagnosed(trt, runtime, data)
    for name in names:
        is_engine, meaning, hint = _DIAGNOSES[name]
        message = f"{who}: the engine in {plan.parent} does not open: {meaning} ({lines.words})"
        return CacheError(message, hint) if is_engine else RunError(message, hint)
    message = f"{who}: the engine in {plan.parent} does not open: {lines.words}"
    if "cudaError" in lines.words:
        return RunError(message, "check `nvidia-smi`")
    return CacheError(message)


def _diagnosed(trt: Runtime, runtime: Any, data: Any) -> list[str]:
    """Returns the runtime's diagnoses; asked only where there is a driver.

    Without one the answer is "invalid" for any plan: that says nothing of the plan.
    """
    kinds = getattr(trt, "EngineInvalidityDiagnostics", None)
    if kinds is None or not hasattr(runtime, "get_engine_validity"):
        return []  # TensorRT 11 has neither
    _, bits = runtime.get_engine_validity(data)
    return [
        name
        for name in _DIAGNOSES
        if name in kinds.__members__ and int(bits) & int(kinds.__members__[name])
    ]
