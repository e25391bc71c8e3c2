"""The contract's methods across the wire: a vendor, and a session, that live in a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .contract import (
    Arrays,
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Rejection,
    Report,
    Shapes,
    TensorSpec,
    VendorSpec,
    record_from_json,
    record_to_json,
)
from .errors import RunError, WorkerError
from .worker_process import Answer, WorkerProcess, WorkerSettings


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of every run: wall time, and CPU time of all threads of the worker."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


class WorkerClient:
    """A `Vendor` in a worker of its own. Use it as a context manager, from one thread at a time."""

    def __init__(
        self,
        spec: VendorSpec,
        *,
        python: Path | None = None,
        is_isolated: bool = False,
        settings: WorkerSettings | None = None,
    ) -> None:
        """Starts the worker; the arguments are those of `WorkerProcess`."""
        self.spec = spec
        self.process = WorkerProcess(
            spec, python=python, is_isolated=is_isolated, settings=settings
        )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """True while the worker runs."""
        return self.process.is_alive

    def close(self) -> None:
        """Ends the worker. Video memory is free when this returns. Twice is fine."""
        self.process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def probe(self, device: Device) -> str | Rejection:
        """As `Vendor.probe`."""
        result = self.process.request("probe", {"device": record_to_json(device)}).result
        if "rejection" in result:
            return record_from_json(Rejection, result["rejection"])
        return str(result["runtime"])

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        """As `Vendor.plan`."""
        result = self.process.request(
            "plan",
            {"device": record_to_json(device), "precision": precision, "options": dict(options)},
        ).result
        if "rejection" in result:
            return record_from_json(Rejection, result["rejection"])
        return record_from_json(Plan, result["plan"])

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
        """As `Vendor.compile`."""
        self.process.request(
            "compile",
            {
                "request": record_to_json(request),
                "onnx": str(onnx),
                "out": str(out),
                "device": record_to_json(device),
                "siblings": [record_to_json(one) for one in siblings],
            },
            report=report,
        )

    def can_emit(self) -> bool:
        """Whether the vendor is an `EmittingVendor`."""
        return bool(self.process.request("can_emit", {}).result["can_emit"])

    def emit(self, engine: Engine, out: Path) -> None:
        """As `EmittingVendor.emit`."""
        self.process.request("emit", {"engine": record_to_json(engine), "out": str(out)})

    def load(self, engine: Engine, device: Device) -> RemoteSession:
        """As `Vendor.load`; the session lives in the worker."""
        result = self.process.request(
            "load", {"engine": record_to_json(engine), "device": record_to_json(device)}
        ).result
        return RemoteSession(
            process=self.process,
            number=result["session"],
            inputs=record_from_json(tuple[TensorSpec, ...], result["inputs"]),
            outputs=record_from_json(tuple[TensorSpec, ...], result["outputs"]),
            facts=result["facts"],
        )

    def generate(
        self,
        params: Mapping[str, Any],  # Any: JSON data, see worker_images.ImageDesk
        arrays: Arrays,
        report: Report,
    ) -> Answer:
        """Runs the whole denoising loop in the worker."""
        return self.process.request("generate", params, arrays, report)

    def time_bare(
        self, onnx: Path, shapes: Shapes, device: Device, feeds: Arrays, *, runs: int
    ) -> Timing:
        """As `RemoteSession.time`, but of the vendor's runtime used directly."""
        params = {
            "session": None,
            "onnx": str(onnx),
            "shapes": record_to_json(shapes),
            "device": record_to_json(device),
            "runs": runs,
        }
        return record_from_json(Timing, self.process.request("time", params, feeds).result)

    def record(self, params: Mapping[str, Any], report: Report) -> Answer:
        """As `generate`, but returns what every component was fed and answered."""
        return self.process.request("record", params, report=report)


class RemoteSession:
    """A `Session` whose engine is loaded in a worker."""

    def __init__(
        self,
        *,
        process: WorkerProcess,
        number: int,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        facts: Mapping[str, str],
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.facts = dict(facts)
        self._process = process
        self._params = {"session": number}

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """As `Session.run`."""
        return dict(self._process.request("run", self._params, feeds).arrays)

    def time(self, component: str, feeds: Arrays, *, runs: int) -> Timing:
        """Runs the step of a component `runs` times in the worker."""
        params = {**self._params, "component": component, "runs": runs}
        return record_from_json(Timing, self._process.request("time", params, feeds).result)

    def close(self) -> None:
        """As `Session.close`."""
        with contextlib.suppress(WorkerError, RunError):
            self._process.request("close", self._params)
