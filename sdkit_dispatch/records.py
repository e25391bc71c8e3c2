"""The records that flow through sdkit-dispatch; `contract` hands them out.

Data flows one way: `Device` -> `Plan` -> `BuildRequest` -> `Engine` -> result. Every record is
frozen, is made from the one before it, and survives JSON (`record_to_json`, `record_from_json`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

SCHEMA_VERSION = 1
"""Of every record below; part of an engine's key."""

SCHEDULERS = ("euler", "euler_a", "ddim", "dpmpp_2m", "dpmpp_2m_karras", "lcm")
DeviceKind = Literal["discrete", "integrated", "npu", "cpu"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "q8_0", "q5_0", "q4_0"]
Shapes = Mapping[str, tuple[int, ...]]
"""Input name -> static shape."""
SizeRanges = Mapping[str, tuple[Mapping[str, tuple[int, int, int]], ...]]
"""Component -> alternatives: axis ("batch", "height", ...) -> least, usual and largest size."""
Arrays = Mapping[str, Any]
"""Tensor name -> numpy.ndarray (`Any`: the contract does not import numpy)."""
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that keeps a device from being used fully, and what to do about it."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor of this machine, or (`is_absent`) one that an engine is built for ahead of time.

    Attributes:
        id: Stable name: "cpu", "pci:0000:01:00.0", "uuid:GPU-...", "uuid:MIG-..." or "luid:...".
        maker: "nvidia", "amd", "intel", "apple", ... or the PCI vendor id ("1af4") if unknown.
        arch: "sm_89", "gfx1201", "xe2-hpg", "x86_64", "arm64"; empty if unknown.
        pci_id: "10de:2684"; empty for a device that is not on a PCI bus.
        memory_bytes: Memory that the device owns; None if unknown, 0 if it only borrows.
        driver: Driver version as the driver says it; empty if unknown or without a driver.
        problems: Why it cannot be used fully, each with a remedy.
        sources: Field name -> where the fact came from ("NVML", "/sys/bus/pci/...").
    """

    id: str
    kind: DeviceKind
    maker: str
    name: str
    arch: str = ""
    pci_id: str = ""
    pci_address: str = ""
    uuid: str = ""
    luid: str = ""
    memory_bytes: int | None = None
    driver: str = ""
    problems: tuple[Problem, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    is_absent: bool = False


@dataclass(frozen=True, kw_only=True)
class RuntimeVariant:
    """Another build of a vendor's runtime, as `VendorSpec` describes the usual one."""

    extra: str
    runtime_packages: tuple[str, ...]
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VendorSpec:
    """What the core must know of a vendor before any of its code runs.

    Attributes:
        extra: Name of the extra of the distribution that brings the vendor's runtime.
        adapter: "module:Class", imported in the worker only.
        pci_vendors: PCI vendor ids ("8086") of devices that it serves; empty for any. It says
            nothing of a processor, which is on no PCI bus.
        platforms: "linux-x86_64", "windows-x86_64", "macos-arm64", ...; empty for any.
        rank: Order among vendors that serve the same device, lowest first. None: a vendor that is
            used only when named.
        revision: Raised whenever the adapter compiles differently; part of an engine's key.
        runtime_packages: Distributions that hold the runtime; all must be installed.
        conflicts: Distributions that overwrite the runtime's files; none may be installed.
        takes: "onnx": an exported pipeline, through `Vendor`; "checkpoint": one file with all
            weights, through `PipelineVendor`.
        disk_factor: Size of an engine over that of its graph and weights, roughly and at most.
        memory_factor: Memory that compiling takes over that size, roughly.
        shared_files: Files of an engine that one of the same weights and another size links, where
            it can, instead of writing its own.
        variant: Which build of the runtime the three above are: "cu13"; empty if there is one.
        variants: The other builds, of which an environment can hold one instead: "cu12" -> ...
        install_note: What a user must do or know before an installation; empty if nothing.
        also_used: Distributions that the runtime takes up where they are installed: what a vendor
            says is remembered for as long as they are the same, too.
    """

    name: str
    extra: str
    adapter: str
    device_kinds: tuple[DeviceKind, ...]
    revision: int
    rank: int | None = None
    pci_vendors: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    runtime_packages: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    also_used: tuple[str, ...] = ()
    disk_factor: float = 1.1
    memory_factor: float = 3.0
    shared_files: tuple[str, ...] = ()
    variant: str = ""
    variants: Mapping[str, RuntimeVariant] = field(default_factory=dict)
    install_note: str = ""

    def of_variant(self, name: str) -> VendorSpec:
        """Returns this vendor with another build of its runtime.

        Raises:
            KeyError: There is no such build.
        """
        if name == self.variant:
            return self
        one = self.variants[name]
        return replace(
            self,
            extra=one.extra,
            runtime_packages=one.runtime_packages,
            conflicts=one.conflicts,
            variant=name,
        )

    takes: Literal["onnx", "checkpoint"] = "onnx"


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A "no": why a vendor does not serve a device, and what would change that."""

    vendor: str
    code: str
    reason: str
    hint: str = ""
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A vendor that will serve a device, how, and why.

    Attributes:
        precision: What the engine is built for; what really runs is in `Session.facts`.
        target: What the engine is bound to: "sm_89", "gfx1100", "isa=avx2", "driver=..."; empty
            if it runs anywhere.
        runtime: As `Vendor.probe` names it: "openvino 2026.4.1"; empty while only installable.
        options: The vendor's own options, complete; all of them are part of an engine's key.
        ranges: Sizes that one engine of a component serves; a component that is not named needs an
            engine for each size.
        state: "installable": planned from the support table, confirmed once it is installed.
        reasons: Sentences, most important first.
    """

    vendor: str
    device: Device
    precision: Precision
    target: str = ""
    runtime: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: each vendor owns its values
    ranges: SizeRanges = field(default_factory=dict)
    state: Literal["ready", "installable"] = "ready"
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Everything that decides what an engine computes and where it can run, and nothing else.

    Attributes:
        passes: `graph.REVISION`: of the passes that vendors run over the graph first.
        graph_digest: sha256 of the ONNX file.
        weights_digest: sha256 over the external data files; empty if the weights are inside.
        shapes: The static shape of every input of the graph; the usual one, where an engine serves
            a range (`Plan.ranges`).
    """

    vendor: str
    revision: int
    runtime: str
    target: str
    component: str
    graph_digest: str
    weights_digest: str
    precision: Precision
    shapes: Shapes
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: each vendor owns its values
    passes: int = 0
    schema: int = SCHEMA_VERSION

    @property
    def key(self) -> str:
        """The sha256 of the canonical JSON of this request: the name of its engine."""
        text = json.dumps(record_to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Compiled files of one component.

    Attributes:
        folder: Holds the vendor's files; read-only for the vendor once compiled.
        onnx: The component's ONNX file on this machine, for an engine that maps its weights.
        opened_at: The shapes to open it at, where it serves more than those of its request.
    """

    key: str
    request: BuildRequest
    folder: str
    onnx: str
    opened_at: Shapes | None = None

    @property
    def shapes(self) -> Shapes:
        """What a session of it is fed."""
        return self.request.shapes if self.opened_at is None else self.opened_at


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype ("float32", "int64", as numpy has them) and shape of an input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One report of long work.

    Attributes:
        phase: A few words: "compile unet", "denoise".
        fraction: 0..1 within the phase; None if it cannot be known.
    """

    phase: str
    fraction: float | None = None


Report = Callable[[Progress], None]
"""Called often by long work. Raises `errors.CancelledByUser` once the user has cancelled."""


def no_report(progress: Progress) -> None:
    """Ignores progress; for callers that do not show any."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One call of text to image; `batch` images with the seeds `seed`, `seed + 1`, ...

    A vendor is given values that were checked (`diffusion.request_values`).

    Attributes:
        scheduler: One of `SCHEDULERS`.
        guidance: CFG scale; 1 or less means no guidance.
    """

    prompt: str
    negative_prompt: str = ""
    width_px: int
    height_px: int
    steps: int = 20
    guidance: float = 7.0
    seed: int = 0
    batch: int = 1
    scheduler: str = "dpmpp_2m"


def record_to_json(record: Any) -> Any:
    """Returns a record of this module as plain JSON data (dicts, lists, strings, numbers)."""
    import msgspec  # late: `devices` and `--help` do without

    return msgspec.to_builtins(record)


def record_from_json(kind: type[Record], data: Any) -> Record:
    """Returns the record that `data` describes.

    Raises:
        ValueError: A field is missing or has another type; says which.
    """
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
