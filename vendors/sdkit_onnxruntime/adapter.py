"""The `cpu` vendor: ONNX Runtime's CPU execution provider.

An engine is the graph as ONNX Runtime optimised it, once, beside one file of weights that the
operating system maps at load. Loading optimises nothing, so it takes a fraction of the time and
gives bit for bit what the optimising session gave (ONNX Runtime 1.32).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as bindings

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Progress,
    Rejection,
    Report,
    TensorSpec,
)
from sdkit_dispatch.errors import CacheError, CompileError, UnsupportedOpError
from sdkit_dispatch.graph.static_shapes import free_inputs, make_static
from sdkit_dispatch.graph.tensors import static_spec
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_onnxruntime.isa import isa_of_this_cpu
from sdkit_onnxruntime.session import OrtSession

logger = logging.getLogger(__name__)

PROVIDER = "CPUExecutionProvider"
RUNTIME = f"onnxruntime {ort.__version__}"
GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"

_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_NO_KERNEL = ("is not a registered function/op", "No Op registered", "Could not find an implement")


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """The options of the cpu vendor.

    Attributes:
        graph_optimization: "all" lays convolutions out for this processor's vector width (17 to
            26 % faster steps on small UNets and VAEs) and binds the engine to it; "extended" and
            less run on any processor; "disabled" computes the
            operators of the export, none of them fused.
    """

    graph_optimization: Literal["all", "extended", "basic", "disabled"] = "all"


class CpuAdapter:
    """Serves the processor of this machine.

    Attributes:
        threads: How many threads sessions loaded from now on use; None leaves it to the runtime.
            It is no option: it changes no engine.
    """

    def __init__(self) -> None:
        # A no-op but on Windows, where the official builds send usage events.
        ort.disable_telemetry_events()
        self.threads: int | None = None

    def probe(self, device: Device) -> str | Rejection:
        if device.kind != "cpu":
            return _rejection(device, "not-a-cpu", f"it serves the processor, not {device.name}")
        if device.is_absent:
            return _rejection(device, "absent-device", "it is not the processor of this machine")
        if PROVIDER not in ort.get_available_providers():
            return _rejection(
                device,
                "no-provider",
                f"{RUNTIME} offers {ort.get_available_providers()}, not {PROVIDER}",
                hint="sdkit-dispatch vendors install cpu",
            )
        try:
            _session(_identity_model(), _session_options("disabled", self.threads))
        except Exception as error:  # a broken installation raises anything
            return _rejection(
                device,
                "runtime-broken",
                f"{RUNTIME} does not run a one-node graph: {error}",
                hint="sdkit-dispatch vendors install cpu",
            )
        return RUNTIME

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(CpuOptions, "cpu", options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        if precision not in (None, "fp32"):
            return _rejection(
                device,
                "precision",
                f"it computes in fp32 only, asked for {precision}",
                hint="ask for fp32; a float16 graph runs too, computed in fp32",
            )
        is_bound = chosen.graph_optimization == "all"
        target = f"isa={isa_of_this_cpu()}" if is_bound else ""
        return Plan(
            vendor="cpu",
            device=device,
            precision="fp32",
            target=target,
            runtime=RUNTIME,
            options=asdict(chosen),
            reasons=(
                "ONNX Runtime's CPU kernels compute in fp32",
                f"engines are optimised for {target}" if is_bound else "engines run on any CPU",
            ),
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
        options = options_from_mapping(CpuOptions, "cpu", request.options)
        report(Progress(phase=f"read {request.component}"))
        model = make_static(onnx, request.shapes)
        report(Progress(phase=f"optimise {request.component}"))
        # One thread: constant folding is the only computing here.
        settings = _session_options(options.graph_optimization, 1)
        settings.optimized_model_filepath = str(out / GRAPH_FILE)
        for key, value in {
            "session.model_external_initializers_file_folder_path": str(onnx.parent),
            "session.optimized_model_external_initializers_file_name": WEIGHTS_FILE,
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }.items():
            settings.add_session_config_entry(key, value)
        try:
            _session(model.SerializeToString(), settings)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            raise _compile_error(request.component, model, error) from error
        report(Progress(phase=f"optimise {request.component}", fraction=1.0))

    def load(self, engine: Engine, device: Device) -> OrtSession:
        request, folder = engine.request, Path(engine.folder)
        _check_built_for_here(request)
        path = folder / GRAPH_FILE
        try:
            graph = onnx.load(path, load_external_data=False).graph
            session = _session(str(path), _session_options("disabled", self.threads))
            inputs = tuple(static_spec(value) for value in free_inputs(graph))
            outputs = _outputs(session, graph, inputs)
        except Exception as error:  # protobuf, the file system and a dozen classes of the bindings
            raise CacheError(
                f"cpu: the engine of {request.component} in {folder} does not open: {error}"
            ) from error
        facts = {
            "device": device.name,
            "precision": "fp32",
            "provider": PROVIDER,
            "runtime": RUNTIME,
            "threads": str(self.threads or "default"),
            "graph_dtype": _graph_dtype(graph),
        }
        return OrtSession("cpu", session, inputs, outputs, facts)


def _session_options(level: str, threads: int | None) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.graph_optimization_level = _LEVELS[level]
    # Errors only: it warns that a model saved at "all" is bound to the processor; we know.
    settings.log_severity_level = 3
    if threads is not None:
        settings.intra_op_num_threads = threads
    return settings


def _session(model: str | bytes, settings: ort.SessionOptions) -> ort.InferenceSession:
    session = ort.InferenceSession(model, settings, providers=[PROVIDER], enable_fallback=0)
    if session.get_providers() != [PROVIDER]:
        raise RuntimeError(f"asked for {PROVIDER}, got {session.get_providers()}")
    return session


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor="cpu", code=code, reason=reason, hint=hint, device=device.id)


def _identity_model() -> bytes:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "probe", [value], [result]),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return bytes(model.SerializeToString())


def _check_built_for_here(request: BuildRequest) -> None:
    here = f"isa={isa_of_this_cpu()}"
    if request.runtime != RUNTIME:
        raise CacheError(
            f"cpu: the engine of {request.component} was built by {request.runtime}, "
            f"this is {RUNTIME}"
        )
    if request.target not in ("", here):
        raise CacheError(
            f"cpu: the engine of {request.component} was built for {request.target}, "
            f"this processor is {here}"
        )


def _outputs(
    session: ort.InferenceSession, graph: onnx.GraphProto, inputs: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    try:
        return tuple(static_spec(value) for value in graph.output)
    except ValueError:
        # An unoptimised graph may leave its output shapes to the run.
        names = [value.name for value in graph.output]
        zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in inputs}
        return tuple(
            TensorSpec(name=name, dtype=array.dtype.name, shape=array.shape)
            for name, array in zip(names, session.run(names, zeros), strict=True)
        )


def _graph_dtype(graph: onnx.GraphProto) -> str:
    """Returns "float16" if the graph holds half-precision tensors, else "float32"."""
    half = onnx.TensorProto.FLOAT16
    values = [*graph.input, *graph.output]
    is_half = any(tensor.data_type == half for tensor in graph.initializer) or any(
        value.type.tensor_type.elem_type == half for value in values
    )
    return "float16" if is_half else "float32"


def _compile_error(component: str, model: onnx.ModelProto, error: Exception) -> CompileError:
    words = str(error)
    if not any(sign in words for sign in _NO_KERNEL):
        return CompileError(f"cpu: {RUNTIME} refuses {component}: {words}")
    missing = ", ".join(_unregistered_ops(model)) or "see above"
    return UnsupportedOpError(
        f"cpu: {RUNTIME} refuses {component}: {words}; operators it does not have: {missing}"
    )


def _unregistered_ops(model: onnx.ModelProto) -> list[str]:
    """Returns all operators that the runtime has no schema for; its error names the first."""
    known = {(s.domain, s.name) for s in bindings.get_all_operator_schema()}
    known |= {(function.domain, function.name) for function in model.functions}
    used = {("" if n.domain == "ai.onnx" else n.domain, n.op_type) for n in model.graph.node}
    return sorted(f"{domain or 'ai.onnx'}:{op_type}" for domain, op_type in used - known)
