"""The null vendor's adapter: what every method must do, without a runtime in the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.external_data_helper import (
    load_external_data_for_model,
    set_external_data,
    write_external_data_tensors,
)
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import (
    Arrays,
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
from sdkit_dispatch.errors import CacheError, CompileError, PipelineError, RunError
from sdkit_dispatch.graph.size_ranges import check_ranges, plan_ranges
from sdkit_dispatch.graph.static_shapes import free_inputs, make_static, read_graph
from sdkit_dispatch.graph.tensors import check_feeds, static_spec
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_null.faults import (
    Fault,
    NullOptions,
    active_fault,
    show_fault,
    spoil,
    wait_for_cancel,
)

RUNTIME = f"null {onnx.__version__}"
GRAPH_FILE = "graph.onnx"
SPECS_FILE = "engine.json"


class NullAdapter:
    """Serves every device with the reference evaluator of the `onnx` package.

    Attributes:
        threads: Has no effect: numpy decides.
        has_lost_device: By the fault "device_lost"; only a new process gets a device back.
    """

    threads: int | None = None
    has_lost_device = False

    def _require_device(self) -> None:
        if self.has_lost_device:
            raise RunError("null: this process has lost the device")

    def probe(self, device: Device) -> str | Rejection:
        return RUNTIME

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(NullOptions, "null", options)
        check_ranges("null", chosen.profiles, options)
        if chosen.fault == "reject":
            return Rejection(
                vendor="null",
                code="asked",
                reason='its option fault is "reject"',
                hint="set options.null.fault: none",
                device=device.id,
            )
        return Plan(
            vendor="null",
            device=device,
            precision=precision or "fp32",
            target=chosen.target.replace("{driver}", device.driver),
            runtime=RUNTIME,
            options=asdict(chosen),
            ranges=plan_ranges(chosen.profiles),
            reasons=("it was named: the null vendor is never chosen by itself",),
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
        options = options_from_mapping(NullOptions, "null", request.options)
        fault = active_fault(options, request, device)
        self._require_device()
        phase = f"compile {request.component}"
        report(Progress(phase=phase, fraction=0.0))
        model = make_static(onnx, request.shapes)
        show_fault(fault, "compile", request.component)
        if fault == "wait_for_cancel":
            wait_for_cancel(report, phase)
        inputs = tuple(static_spec(value) for value in free_inputs(model.graph))
        outputs = _output_specs(model, onnx.parent, inputs)
        if options.holds_weights:
            _move_weights(model, onnx.parent, out)
        # Other external weights stay where they are: `load` finds them through `engine.onnx`.
        kept = read_graph(onnx) if request.component in options.profiles else model
        (out / GRAPH_FILE).write_bytes(kept.SerializeToString(deterministic=True))
        specs = {
            "runtime": RUNTIME,
            "inputs": [asdict(spec) for spec in inputs],
            "outputs": [asdict(spec) for spec in outputs],
        }
        (out / SPECS_FILE).write_text(json.dumps(specs, indent=1))
        for step in range(options.compile_steps):
            report(Progress(phase=phase, fraction=(step + 1) / options.compile_steps))

    def load(self, engine: Engine, device: Device) -> NullSession:
        request = engine.request
        options = options_from_mapping(NullOptions, "null", request.options)
        fault = active_fault(options, request, device)
        self._require_device()
        show_fault(fault, "load", request.component)
        folder = Path(engine.folder)
        try:
            specs = json.loads((folder / SPECS_FILE).read_text())
            built_by = specs["runtime"]
            inputs, outputs = (_specs_from_json(specs[side]) for side in ("inputs", "outputs"))
            model = read_graph(folder / GRAPH_FILE)
            weights = folder if options.holds_weights else Path(engine.onnx).parent
            if engine.opened_at is not None:
                model = make_static(folder / GRAPH_FILE, engine.shapes)
                inputs = tuple(static_spec(value) for value in free_inputs(model.graph))
                outputs = _output_specs(model, weights, inputs)
            evaluator = _evaluator(model, weights)
        except (OSError, ValueError, KeyError, TypeError, PipelineError) as error:
            raise CacheError(
                f"null: the engine of {request.component} in {folder} does not open: {error}"
            ) from error
        if built_by != RUNTIME:
            raise CacheError(
                f"null: the engine of {request.component} in {folder} was built by {built_by}; "
                f"this is {RUNTIME}"
            )
        return NullSession(self, evaluator, inputs, outputs, request, device, fault)


class NullSession:
    """A graph in the reference evaluator."""

    def __init__(
        self,
        adapter: NullAdapter,
        evaluator: ReferenceEvaluator,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        request: BuildRequest,
        device: Device,
        fault: Fault,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.facts: Mapping[str, str] = MappingProxyType(
            {"device": device.name, "precision": request.precision, "runtime": request.runtime}
        )
        self._evaluator: ReferenceEvaluator | None = evaluator
        self._adapter = adapter
        self._component = request.component
        self._fault = fault

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        if self._evaluator is None:
            raise RunError(f"null: the session of {self._component} is closed")
        self._adapter.has_lost_device |= self._fault == "device_lost"
        show_fault(self._fault, "run", self._component)
        arrays = _evaluate(self._evaluator, feeds)
        # A copy: an output of the evaluator may be a view of a feed or of a weight.
        return {
            spec.name: spoil(self._fault, np.array(array))
            for spec, array in zip(self.outputs, arrays, strict=True)
        }

    def close(self) -> None:
        self._evaluator = None


def _move_weights(model: onnx.ModelProto, weights_folder: Path, out: Path) -> None:
    """Writes every weight to a file of its own in `out`; `model` then refers to those."""
    load_external_data_for_model(model, str(weights_folder))
    for index, tensor in enumerate(model.graph.initializer):
        tensor.raw_data = numpy_helper.to_array(tensor).tobytes()
        set_external_data(tensor, f"weights-{index}.bin")
    write_external_data_tensors(model, str(out))


def _evaluator(model: onnx.ModelProto, weights_folder: Path) -> ReferenceEvaluator:
    load_external_data_for_model(model, str(weights_folder))
    return ReferenceEvaluator(model)


def _evaluate(evaluator: ReferenceEvaluator, feeds: Arrays) -> list[Any]:
    # Overflow in a graph is the graph's business (an attention mask of -inf is common).
    with np.errstate(all="ignore"):
        return list(evaluator.run(None, dict(feeds)))


def _output_specs(
    model: onnx.ModelProto, weights_folder: Path, inputs: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    """Returns the outputs as one evaluation on zeros gives them: always static."""
    zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in inputs}
    loaded = onnx.ModelProto()
    loaded.CopyFrom(model)
    try:
        arrays = _evaluate(_evaluator(loaded, weights_folder), zeros)
    except Exception as error:  # whatever numpy or an operator raises
        raise CompileError(f"null: the reference evaluator refuses the graph: {error}") from error
    return tuple(
        TensorSpec(name=value.name, dtype=array.dtype.name, shape=array.shape)
        for value, array in zip(model.graph.output, arrays, strict=True)
    )


# Any: parsed JSON.
def _specs_from_json(rows: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=row["name"], dtype=row["dtype"], shape=tuple(row["shape"])) for row in rows
    )
