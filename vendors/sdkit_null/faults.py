"""Faults that the null vendor shows on request, so that the core's answers can be tested."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sdkit_dispatch.contract import BuildRequest, Device, DeviceKind, Precision, Progress, Report
from sdkit_dispatch.errors import CacheError, CompileError, RunError, UnsupportedOpError
from sdkit_dispatch.graph.size_ranges import Ranges

Array = np.ndarray[Any, np.dtype[Any]]  # Any: whatever shapes and dtypes a graph declares
Stage = Literal["compile", "load", "run"]
Fault = Literal[
    "none",
    "reject",
    "nan",
    "constant",
    "drift",
    "compile_error",
    "unsupported_op",
    "load_error",
    "run_error",
    "crash_on_compile",
    "crash_on_load",
    "crash_on_run",
    "hang_on_compile",
    "hang_on_load",
    "hang_on_run",
    "out_of_memory_on_compile",
    "out_of_memory_on_load",
    "out_of_memory_on_run",
    "device_lost",
    "wait_for_cancel",
    "print_to_stdout",
]
DRIFT = 0.05
"""Relative error of the "drift" fault: far above rounding, too small to see at a glance."""


@dataclass(frozen=True, kw_only=True)
class NullOptions:
    """The options of the null vendor.

    Attributes:
        fault: What goes wrong; "none" is a healthy vendor.
        only_component: The fault shows in this component only; empty for all.
        only_precision: The fault shows in engines of this precision only; empty for all.
        only_on: The fault shows on devices of this kind only; empty for all.
        compile_steps: How many times `compile` reports progress.
        target: What engines claim to be bound to; "{driver}" in it is the device's.
        holds_weights: Engines hold their weights, a file a tensor, as most vendors' do; else they
            read those of the pipeline.
        profiles: Component -> the size ranges that its engine serves; else the one that is asked.
    """

    fault: Fault = "none"
    only_component: str = ""
    only_precision: Precision | Literal[""] = ""
    only_on: DeviceKind | Literal[""] = ""
    compile_steps: int = 3
    target: str = ""
    profiles: Mapping[str, tuple[Ranges, ...]] = field(default_factory=dict)
    holds_weights: bool = False


def active_fault(options: NullOptions, request: BuildRequest, device: Device) -> Fault:
    """Returns the fault that applies to this component at this precision on this device."""
    is_meant = (
        options.only_component in ("", request.component)
        and options.only_precision in ("", request.precision)
        and options.only_on in ("", device.kind)
    )
    return options.fault if is_meant else "none"


def show_fault(fault: Fault, stage: Stage, subject: str) -> None:
    """Raises, dies, hangs or talks, if `fault` belongs to this stage."""
    if fault == f"out_of_memory_on_{stage}":
        raise MemoryError(f"null: no memory in {stage} of {subject}, as asked")
    if fault == f"crash_on_{stage}":
        print(f"null: crashing in {stage} of {subject}, as asked", file=sys.stderr, flush=True)
        os.abort()
    if fault == f"hang_on_{stage}":
        threading.Event().wait()
    if fault == "print_to_stdout":
        os.write(1, f"null: {stage} of {subject} talks on stdout\n".encode())
    if (stage, fault) in _RAISED:
        kind, words = _RAISED[stage, fault]
        raise kind(f"null: {subject}: {words}")


def wait_for_cancel(report: Report, phase: str) -> None:
    """Reports without end; only a cancellation, raised by `report`, leaves it."""
    pause = threading.Event()
    while True:
        report(Progress(phase=phase))
        pause.wait(0.01)


def spoil(fault: Fault, array: Array) -> Array:
    """Returns an output as the fault leaves it; integers stay as they are."""
    change = _SPOILS.get(fault)
    return array if change is None or array.dtype.kind != "f" else change(array)


_RAISED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("compile", "compile_error"): (CompileError, "the compiler refuses this graph, as asked"),
    ("compile", "unsupported_op"): (UnsupportedOpError, "no kernel for: Frobnicate, Wibble"),
    ("load", "load_error"): (CacheError, "the engine does not open, as asked"),
    ("run", "run_error"): (RunError, "the device failed, as asked"),
    ("run", "device_lost"): (RunError, "the device was lost, as asked"),
}

_SPOILS: dict[str, Callable[[Array], Array]] = {
    "nan": lambda array: np.full_like(array, np.nan),
    "constant": lambda array: np.full_like(array, 0.5),
    # Along the last axis, so that no rescaling by one factor hides it.
    "drift": lambda array: (
        array * np.linspace(1 - DRIFT, 1 + DRIFT, array.shape[-1], dtype=array.dtype)
        if array.ndim
        else array * (1 + DRIFT)
    ),
}
