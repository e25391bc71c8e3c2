"""The openvino vendor: processors, and the GPUs and NPUs of Intel.

An engine is what `export_model` writes, in our own file and under our own key. OpenVINO's
CACHE_DIR is never used: for a model given by path its key leaves out external weights, and it
returned the output of the old ones (2026.4.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import ModelProto

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Progress,
    Rejection,
    Report,
)
from sdkit_dispatch.errors import CacheError, CompileError, RunError, UnsupportedOpError
from sdkit_dispatch.graph.external_data import external_locations
from sdkit_dispatch.graph.static_shapes import free_inputs, make_static
from sdkit_dispatch.graph.upsampling import is_cropped
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_openvino.addressing import family_of, find_device, why_not_offered
from sdkit_openvino.compiled_model import (
    TYPES,
    check_runs_as_asked,
    check_same_tensors,
    facts_of,
    properties_for,
    specs_of,
)
from sdkit_openvino.devices import (
    capabilities,
    complaint_of,
    offered_devices,
    property_text,
    target_of,
)
from sdkit_openvino.engine_files import BLOB_FILE, EngineNote, read_note, write_note
from sdkit_openvino.mapped_weights import (
    can_import,
    export_properties,
    import_properties,
    mapped_location,
)
from sdkit_openvino.runtime import RUNTIME, ov, words_of
from sdkit_openvino.session import OpenVinoSession
from sdkit_openvino.winograd import has_use_for_winograd, use_winograd

# Best first. A GPU's and an NPU's speed is in half precision; on a processor it would be a loss of
# accuracy that nobody asked for.
_BEST: dict[str, tuple[Precision, ...]] = {
    "CPU": ("fp32",),
    "GPU": ("fp16", "fp32"),
    "NPU": ("fp16",),
}
_NO_RULE = (
    "No conversion rule found for operations:",  # 2026.4
    "does not support the following ONNX operations:",  # 2025.4
)


@dataclass(frozen=True, kw_only=True)
class OpenVinoOptions:
    """The options of the openvino vendor.

    Attributes:
        map_weights: Leave the weights in the ONNX pipeline's own external file and map it at load,
            where that works (a processor, and all external weights in one file): an engine of a
            few megabytes instead of gigabytes, which needs the pipeline folder to stay.
        winograd: Which 3x3 convolutions of a processor of Intel's or AMD's take half the
            multiplications, from kernels twice as large that are in the engine: "auto" those of
            many channels and pixels, "all" or "none". No other precision than fp32 takes it.
    """

    map_weights: bool = True
    winograd: Literal["auto", "all", "none"] = "auto"


class OpenVinoAdapter:
    """Serves processors, and the GPUs and NPUs of Intel.

    Attributes:
        threads: How many threads sessions on a processor use; None leaves it to the runtime. It is
            no option: it changes no engine.
        warm_up: Whether `load` runs an engine once. The first run of the sample UNet takes 2.3
            times as long as the next ones.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.warm_up = True
        self._core: ov.Core | None = None
        self._targets: dict[str, str] = {}

    def probe(self, device: Device) -> str | Rejection:
        try:
            name = self._name_of(device)
            return name if isinstance(name, Rejection) else self._probe_name(device, name)
        except Exception as error:  # a broken installation or driver raises anything
            return _rejection(
                device,
                "runtime-broken",
                f"{RUNTIME} does not compile a one-node graph for {device.name}: {words_of(error)}",
                hint="sdkit-dispatch vendors install openvino",
            )

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(OpenVinoOptions, "openvino", options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        name = self._name_of(device)
        if isinstance(name, Rejection):
            return name
        family = family_of(device)
        offered = capabilities(self._open_core(), name)
        wanted = _BEST[family] if precision is None else (precision,)
        usable = [one for one in wanted if one in TYPES and one.upper() in offered]
        if not usable:
            return _rejection(
                device,
                "precision",
                f"{name} computes in {', '.join(p for p in TYPES if p.upper() in offered)}, "
                f"asked for {precision or ' or '.join(wanted)}",
                hint=f"ask for {_BEST[family][0]}",
            )
        full_name = property_text(self._open_core(), name, "FULL_DEVICE_NAME")
        return Plan(
            vendor="openvino",
            device=device,
            precision=usable[0],
            target=self._target(name),
            runtime=RUNTIME,
            options=asdict(chosen),
            reasons=(f"{RUNTIME} runs on {name}, {full_name}, in {usable[0]}",),
        )

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
        options = options_from_mapping(OpenVinoOptions, "openvino", request.options)
        name = self._name_of(device)
        if isinstance(name, Rejection):
            raise CompileError(f"openvino: {request.component}: {name.reason}", name.hint)
        core, family = self._open_core(), family_of(device)
        report(Progress(phase=f"read {request.component}"))
        graph = make_static(onnx, request.shapes)
        with _refusals_of(request.component):
            model = _read(core, graph, onnx)
            model.reshape({key: list(shape) for key, shape in request.shapes.items()})
            inputs = specs_of([value.name for value in free_inputs(graph.graph)], model.inputs)
            outputs = specs_of([value.name for value in graph.graph.output], model.outputs)
            rewritten = 0
            if options.winograd != "none" and has_use_for_winograd(family, request.precision):
                rewritten = use_winograd(model, everywhere=options.winograd == "all")
        weights = mapped_location(external_locations(graph), family) if options.map_weights else ""
        note = EngineNote(
            inputs=inputs,
            outputs=outputs,
            weights=weights,
            weights_bytes=(onnx.parent / weights).stat().st_size if weights else 0,
            winograd=rewritten,
        )
        report(Progress(phase=f"compile {request.component}"))
        properties = properties_for(request.precision, family, threads=None)
        with _refusals_of(request.component):
            compiled = core.compile_model(model, name, properties | export_properties(note))
            check_runs_as_asked(compiled, name, request.precision)
            blob = compiled.export_model()
        if note.weights and not can_import(core, blob, name, properties, note, onnx.parent):
            report(Progress(phase=f"compile {request.component} again, with its weights"))
            note = replace(note, weights="", weights_bytes=0)
            with _refusals_of(request.component):
                blob = core.compile_model(model, name, properties).export_model()
        (out / BLOB_FILE).write_bytes(blob.getbuffer() if hasattr(blob, "getbuffer") else blob)
        write_note(out, note)
        report(Progress(phase=f"compile {request.component}", fraction=1.0))

    def load(self, engine: Engine, device: Device) -> OpenVinoSession:
        request, folder = engine.request, Path(engine.folder)
        name = self._name_of(device)
        if isinstance(name, Rejection):
            raise RunError(f"openvino: {request.component}: {name.reason}", name.hint)
        self._check_built_for_here(request, name)
        try:
            note = read_note(folder)
            properties = {
                **properties_for(request.precision, family_of(device), threads=self.threads),
                **import_properties(note, Path(engine.onnx).parent),
            }
            # Mapped, copy on write: OpenVINO wants writable memory, the file stays as it is.
            blob = np.memmap(folder / BLOB_FILE, np.uint8, "c")
            tensor = ov.Tensor(blob, shared_memory=True)
            compiled = self._open_core().import_model(tensor, name, properties)
            check_same_tensors(note.inputs, compiled.inputs)
            check_same_tensors(note.outputs, compiled.outputs)
            full_name = property_text(self._open_core(), name, "FULL_DEVICE_NAME")
            facts = facts_of(compiled, full_name)
            facts["weights"] = "mapped" if note.weights else "in the engine"
            facts["winograd"] = str(note.winograd)
            session = OpenVinoSession(compiled, note.inputs, note.outputs, facts, blob)
        except Exception as error:  # a damaged file was seen to raise UnicodeDecodeError too
            raise CacheError(
                f"openvino: the engine of {request.component} in {folder} does not open: "
                f"{words_of(error)}"
            ) from error
        if self.warm_up:
            session.warm_up()
        return session

    def _open_core(self) -> ov.Core:
        if self._core is None:
            self._core = ov.Core()
        return self._core

    def _name_of(self, device: Device) -> str | Rejection:
        if device.is_absent:
            return _rejection(
                device, "absent-device", "its compiler needs the device itself, and it is absent"
            )
        core = self._open_core()
        offered = offered_devices(core)
        found = find_device(device, offered)
        if found is not None:
            return found.name
        return why_not_offered(device, offered, complaint_of(core, family_of(device)))

    def _probe_name(self, device: Device, name: str) -> str | Rejection:
        if "EXPORT_IMPORT" not in capabilities(self._open_core(), name):
            return _rejection(device, "no-export", f"{name} cannot export compiled models")
        self._target(name)
        return RUNTIME

    def _target(self, name: str) -> str:
        if name not in self._targets:
            self._targets[name] = target_of(self._open_core(), name)
        return self._targets[name]

    def _check_built_for_here(self, request: BuildRequest, name: str) -> None:
        for built, here in ((request.runtime, RUNTIME), (request.target, self._target(name))):
            if built != here:
                raise CacheError(
                    f'openvino: the engine of {request.component} was built for "{built}", '
                    f'this is "{here}"'
                )


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor="openvino", code=code, reason=reason, hint=hint, device=device.id)


def _read(core: ov.Core, graph: ModelProto, path: Path) -> ov.Model:
    """Returns the model of a file, as `graph` if that says more than other shapes."""
    if not is_cropped(graph):
        return core.read_model(str(path))
    # The weights of a graph in memory are looked for in the working folder (2026.4.1). A worker
    # does one thing at a time, and nothing here relies on that folder.
    with chdir(path.parent):
        return core.read_model(graph.SerializeToString())


@contextmanager
def _refusals_of(component: str) -> Iterator[None]:
    """Turns whatever OpenVINO raises over a model into a CompileError."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:  # the bindings raise more than RuntimeError
        raise _compile_error(component, error) from error


def _compile_error(component: str, error: Exception) -> CompileError:
    words = words_of(error)
    for sign in _NO_RULE:
        if sign not in words:
            continue
        missing = words.partition(sign)[2].strip()
        return UnsupportedOpError(f"openvino: {component}: {RUNTIME} lacks operators: {missing}")
    return CompileError(f"openvino: {RUNTIME} refuses {component}: {words}")
