"""Computes something small with every installed vendor on every device, and compares."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .contract import BuildRequest, Device, Engine, Plan, Progress, Rejection, VendorSpec
from .detect.choice import select_devices
from .doctor_picture import Picture, draw
from .plan import check_vendor

if TYPE_CHECKING:
    import onnx

    from .api import Dispatcher

FAULTS = ("worker-failed", "runtime-broken")
"""Codes of a "no" that is a fault of the installation, not of the device."""
LIMIT_S = 120.0
"""No step of an examination may take longer: the graph has eleven nodes."""
RUNS = 5
LIMIT = 1e-2
"""Largest error over the largest value: fp16 and bf16 pass, a wrong operator does not."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one vendor did on one device.

    Attributes:
        ran_on: Where the session says that it ran; empty if it did not.
        error: The largest error over the largest reference value; None if it did not run.
        compile_s: Seconds to compile; None if it did not come so far. The same of the others.
        load_s: Seconds to open the engine.
        run_ms: Milliseconds of a run, the best of `RUNS`.
        picture: How the sample pipeline fared; None if it was not asked for, or not come to.
        reasons: What the vendor says of its choice.
    """

    vendor: str
    device: str
    status: Literal["ok", "failed", "skipped"]
    message: str
    hint: str = ""
    ran_on: str = ""
    error: float | None = None
    compile_s: float | None = None
    load_s: float | None = None
    run_ms: float | None = None
    picture: Picture | None = None
    reasons: tuple[str, ...] = ()


def examine(
    dispatcher: Dispatcher,
    *,
    gpu: str = "auto",
    vendor: str | None = None,
    pipeline: str | None = None,
) -> list[Finding]:
    """Examines every installed vendor; a worker that crashes or hangs is one failed finding.

    Args:
        dispatcher: Of the home folder to examine.
        gpu: Which devices; as for `plan`.
        vendor: Only this one; the one way to examine a vendor without a rank.
        pipeline: Also build this one and draw with it: "sample" proves a path in a minute.

    Raises:
        ConfigError: `gpu` or `vendor` names nothing that there is.
    """
    if vendor is not None:
        check_vendor(vendor, list(dispatcher.specs))
    devices = select_devices(dispatcher.devices, gpu)
    refused = dispatcher.unsupported()
    findings = []
    model = small_model()
    for spec in dispatcher.specs.values():
        if vendor not in (None, spec.name) or (spec.rank is None and vendor is None):
            continue  # without a rank it is a tool for tests and experiments
        environment = dispatcher.workers.environment(spec)
        if isinstance(environment, Rejection):
            why = refused.get(spec.name, environment)  # what would not serve need not be installed
            findings.append(
                Finding(
                    vendor=spec.name,
                    device="any",
                    status="skipped",
                    message=why.reason,
                    hint=why.hint,
                )
            )
            continue
        findings += [
            _drawn(dispatcher, _examined(dispatcher, spec, device, model), device, pipeline)
            for device in devices
            if device.kind in spec.device_kinds
        ]
    return findings


def _examined(
    dispatcher: Dispatcher, spec: VendorSpec, device: Device, model: onnx.ModelProto
) -> Finding:
    from .errors import DispatchError

    dispatcher.report(Progress(phase=f"doctor: {spec.name} on {device.name}"))
    try:
        plan = dispatcher.workers.probe(spec, device, None, {})
        if isinstance(plan, Rejection):
            return Finding(
                vendor=spec.name,
                device=device.id,
                status="failed" if plan.code in FAULTS else "skipped",
                message=plan.reason,
                hint=plan.hint,
            )
        return _compared(dispatcher, spec, plan, model)
    except DispatchError as error:
        return Finding(
            vendor=spec.name,
            device=device.id,
            status="failed",
            message=error.message,
            hint=error.hint,
        )


def _drawn(
    dispatcher: Dispatcher, finding: Finding, device: Device, pipeline: str | None
) -> Finding:
    """Goes on with a picture, if that is asked for and there is a chance."""
    from .errors import DispatchError

    if pipeline is None or finding.status != "ok":
        return finding
    dispatcher.report(Progress(phase=f"doctor: {finding.vendor} draws on {device.name}"))
    try:
        picture = draw(dispatcher, finding.vendor, device, pipeline=pipeline)
    except DispatchError as error:
        message = f"{finding.message}; but it does not draw: {error.message}"
        return replace(finding, status="failed", message=message, hint=error.hint)
    return replace(
        finding,
        status="ok" if picture.is_right else "failed",
        message=f"{finding.message}; {picture.sentence}",
        picture=picture,
    )


def _compared(
    dispatcher: Dispatcher, spec: VendorSpec, plan: Plan, model: onnx.ModelProto
) -> Finding:
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    from .check import measure

    feeds = {"x": np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(1, 4, 8, 8)}
    outputs_of: Any = ReferenceEvaluator(model).run(None, feeds)  # Any: numpy.ndarray
    expected = outputs_of[0]
    request = BuildRequest(
        vendor=spec.name,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component="doctor",
        graph_digest="",
        weights_digest="",
        precision=plan.precision,
        shapes={"x": (1, 4, 8, 8)},
        options=plan.options,
    )
    with (
        tempfile.TemporaryDirectory(prefix="sdkit-doctor-") as folder,
        dispatcher.workers.fresh(spec, limit_s=LIMIT_S) as client,
    ):
        path, out = Path(folder, "model.onnx"), Path(folder, "engine")
        out.mkdir()
        onnx.save(model, path)
        started_s = time.monotonic()
        client.compile(request, path, out, device=plan.device, report=dispatcher.report)
        compiled_s = time.monotonic()
        session = client.load(
            Engine(key=request.key, request=request, folder=str(out), onnx=str(path)), plan.device
        )
        loaded_s = time.monotonic()
        outputs = session.run(feeds)
        run_s = min(session.time("doctor", feeds, runs=RUNS).wall_s)
        ran_on = session.facts.get("device", "")
        session.close()
    error = measure(outputs["y"], expected)["relative_max"]
    is_right = bool(np.isfinite(outputs["y"]).all()) and error <= LIMIT
    return Finding(
        vendor=spec.name,
        device=plan.device.id,
        status="ok" if is_right else "failed",
        message=f"{plan.runtime} computed in {plan.precision} on {ran_on}, error {error:.1e}"
        + (f" in {run_s * 1e3:.2f} ms" if is_right else f", more than {LIMIT:g}"),
        hint="" if is_right else f"sdkit-dispatch vendors install {spec.name}",
        ran_on=ran_on,
        error=error if math.isfinite(error) else None,
        compile_s=round(compiled_s - started_s, 3),
        load_s=round(loaded_s - compiled_s, 3),
        run_ms=round(run_s * 1e3, 4),
        reasons=plan.reasons,
    )


def small_model() -> onnx.ModelProto:
    """Returns a graph of 2 KB with what every diffusion model has: convolution, norm, attention.

    Input x and output y: float32 `[1, 4, 8, 8]`.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(7)
    weights: dict[str, Any] = {  # Any: numpy.ndarray
        "kernel": rng.normal(0, 0.2, (4, 4, 3, 3)).astype(np.float32),
        "bias": rng.normal(0, 0.1, 4).astype(np.float32),
        "scale": np.ones(4, np.float32),
        "shift": np.zeros(4, np.float32),
        "rows": np.array([1, 4, 64], np.int64),
        "image": np.array([1, 4, 8, 8], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel", "bias"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("InstanceNormalization", ["c", "scale", "shift"], ["n"]),
        helper.make_node("Sigmoid", ["n"], ["s"]),
        helper.make_node("Mul", ["n", "s"], ["silu"]),
        helper.make_node("Reshape", ["silu", "rows"], ["q"]),
        helper.make_node("Transpose", ["q"], ["k"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "k"], ["qk"]),
        helper.make_node("Softmax", ["qk"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "q"], ["o"]),
        helper.make_node("Reshape", ["o", "image"], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    image = [1, 4, 8, 8]
    graph = helper.make_graph(
        nodes,
        "doctor",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, image)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
