"""What a vendor implements, and the records that pass between it and the core: read this first.

A vendor package holds a plain-data `VendorSpec` in its `__init__.py`, importing no runtime, and
an adapter class in `adapter.py` that implements `Vendor`, or `PipelineVendor` if its engine takes
whole checkpoints. The adapter lives in a worker process: it may import its runtime at module level,
and a crash of it costs nobody but the worker.

The records are described in `records`, and everybody imports them from here: an adapter needs this
module, `errors` and `graph` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .records import (
    SCHEDULERS,
    SCHEMA_VERSION,
    Arrays,
    BuildRequest,
    Device,
    DeviceKind,
    Engine,
    GenerateRequest,
    Plan,
    Precision,
    Problem,
    Progress,
    Record,
    Rejection,
    Report,
    RuntimeVariant,
    Shapes,
    SizeRanges,
    TensorSpec,
    VendorSpec,
    no_report,
    record_from_json,
    record_to_json,
)

__all__ = [
    "Arrays",
    "BuildRequest",
    "Device",
    "DeviceKind",
    "EmittingVendor",
    "Engine",
    "GenerateRequest",
    "PipelineSession",
    "PipelineVendor",
    "Plan",
    "Precision",
    "Problem",
    "Progress",
    "Record",
    "Rejection",
    "Report",
    "RuntimeVariant",
    "SCHEDULERS",
    "SCHEMA_VERSION",
    "Session",
    "Shapes",
    "SizeRanges",
    "TensorSpec",
    "Vendor",
    "VendorSpec",
    "no_report",
    "record_from_json",
    "record_to_json",
]


@runtime_checkable
class Session(Protocol):
    """A loaded engine.

    `facts` says what really runs: at least "device" and "precision", as the runtime reports them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    facts: Mapping[str, str]

    def run(self, feeds: Arrays) -> dict[str, Any]:
        """Computes all outputs. The caller may keep the arrays: they are never written again."""

    def close(self) -> None:
        """Frees device memory; a second call does nothing."""


class Vendor(Protocol):
    """What an adapter class implements. It is constructed without arguments, in a worker.

    `threads` is set by the worker before `load`: CPU threads of a session, None for the runtime's
    own choice. It changes no engine.
    """

    threads: int | None

    def probe(self, device: Device) -> str | Rejection:
        """Tries the runtime on that device. Returns e.g. "openvino 2026.4.1"; never raises."""

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        """Chooses precision (None: the vendor's best) and target; touches no file.

        Raises:
            ConfigError: An option is unknown or has a wrong value.
        """

    def compile(
        self,
        request: BuildRequest,
        onnx: Path,
        out: Path,
        *,
        device: Device,
        report: Report,
        siblings: Sequence[Engine] = (),
    ) -> None:
        """Compiles `onnx` and writes only under the empty folder `out`.

        Reads neither environment variables nor the clock: the same request gives an equivalent
        engine, whatever the `siblings`. Those are verified engines that differ from `request` in
        `shapes` or in `weights_digest` alone; a file of theirs may be linked into `out`.

        Raises:
            CompileError: With the runtime's own words.
        """

    def load(self, engine: Engine, device: Device) -> Session:
        """Opens an engine; never compiles, never modifies `engine.folder`.

        Raises:
            CacheError: The files are damaged, or of another runtime.
        """


@runtime_checkable
class EmittingVendor(Protocol):
    """(optional) A vendor that writes what an engine computes as source code."""

    def emit(self, engine: Engine, out: Path) -> None:
        """Writes a program that stands alone, weights included, under the empty folder `out`.

        The same engine gives the same bytes.

        Raises:
            UnsupportedOpError: Some of it cannot be written; names the component and operators.
        """


class PipelineSession(Protocol):
    """A loaded checkpoint. `facts` as in `Session`."""

    facts: Mapping[str, str]

    def generate(self, request: GenerateRequest, report: Report) -> Any:
        """Returns the images: numpy.ndarray, uint8 `[N, H, W, 3]`; reports each step.

        Raises:
            ConfigError: The engine lacks what the request asks for; says what it has.
            RunError: With the engine's own words.
        """

    def close(self) -> None:
        """Frees device memory; a second call does nothing."""


class PipelineVendor(Protocol):
    """What the adapter of a vendor implements whose engine is a whole pipeline.

    `probe`, `plan` and `threads` are as in `Vendor`.
    """

    threads: int | None

    def probe(self, device: Device) -> str | Rejection:
        """As `Vendor.probe`."""

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        """As `Vendor.plan`."""

    def load(
        self, checkpoint: Path, device: Device, *, options: Mapping[str, Any]
    ) -> PipelineSession:
        """Opens a checkpoint whose header was checked; `options` are those of the plan.

        Raises:
            PipelineError: The engine does not know this kind of model.
            RunError: It does not run on `device`; nothing ever runs elsewhere instead.
        """
