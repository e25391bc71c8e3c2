"""The iree vendor: engines for the processor, and engines for GPUs that are elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import iree.runtime as rt

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Rejection,
    Report,
)
from sdkit_dispatch.errors import CacheError, CompileError, RunError
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_iree.compiling import Blueprint, build_engine
from sdkit_iree.cpu_levels import levels_of_this_cpu
from sdkit_iree.engine_files import WEIGHTS_FILE, read_engine
from sdkit_iree.options import Backend, IreeOptions
from sdkit_iree.runtime import RUNTIME, RUNTIME_VERSION, VERSION, driver_for, open_device
from sdkit_iree.session import IreeSession
from sdkit_iree.targets import backends_for, flags_of, target_of
from sdkit_iree.tools import compiler

VENDOR = "iree"
WORKSHOP = "workshop"
_PRECISIONS: Mapping[bool, tuple[Literal["fp32", "fp16"], ...]] = {
    # Is it the processor? Best first; the graph says what is computed in.
    True: ("fp32", "fp16"),
    False: ("fp16", "fp32"),
}


class IreeAdapter:
    """Serves the processor, and compiles for GPUs of NVIDIA, AMD and Apple that are elsewhere.

    Attributes:
        threads: How many threads sessions use; None leaves it to the runtime. It is no option: it
            changes no engine.
    """

    def __init__(self) -> None:
        self.threads: int | None = None

    def probe(self, device: Device) -> str | Rejection:
        if not backends_for(device):
            return _rejection(
                device, "other-maker", f"its compiler has no backend for devices of {device.maker}"
            )
        if device.kind == "cpu" and device.is_absent:
            return _rejection(device, "absent-device", "it is not the processor of this machine")
        if device.kind != "cpu" and not device.is_absent:
            return _rejection(
                device,
                "build-only",
                f"it runs engines on the processor only, and builds them for GPUs elsewhere; "
                f"{device.name} is here",
                hint=f"sdkit-dispatch build --vendor iree --for {device.arch or 'sm_89'}",
            )
        if device.is_absent and not device.arch:
            return _rejection(device, "arch", "a device to build for needs an architecture")
        return self._probe_runtime(device)

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(IreeOptions, VENDOR, options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        offered = _PRECISIONS[device.kind == "cpu"]
        if precision is not None and precision not in offered:
            return _rejection(
                device,
                "precision",
                f"it computes in {' or '.join(offered)}, asked for {precision}",
                hint=f"ask for {offered[0]}",
            )
        backends = backends_for(device)
        backend = backends[0] if chosen.backend == "auto" else chosen.backend
        if backend not in backends:
            return _rejection(
                device,
                "backend",
                f"options.iree.backend is {backend}, and {device.name} is served by "
                f"{' or '.join(backends)}",
                hint=f"set options.iree.backend: {backends[0]}",
            )
        arch = _arch(backend, device, chosen)
        if isinstance(arch, Rejection):
            return arch
        wanted = precision or offered[0]
        return Plan(
            vendor=VENDOR,
            device=device,
            precision=wanted,
            target=target_of(backend, arch),
            runtime=RUNTIME,
            options=asdict(chosen),
            reasons=(f"IREE {VERSION} compiles ahead of time with {backend} for {arch}",),
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
        options = options_from_mapping(IreeOptions, VENDOR, request.options)
        flags = flags_of(request.target)
        if flags is None or request.precision not in ("fp32", "fp16"):
            raise CompileError(
                f"{VENDOR}: {request.component}: there is no target {request.target!r} in "
                f"{request.precision}",
                hint="build without --precision, or with --for sm_89",
            )
        blueprint = Blueprint(
            who=RUNTIME,
            component=request.component,
            onnx=onnx,
            shapes=request.shapes,
            precision=request.precision,
            flags=flags,
            must_fit=not options.force,
        )
        workshop = out / WORKSHOP
        workshop.mkdir()
        try:
            build_engine(blueprint, workshop, out, report)
        finally:
            shutil.rmtree(workshop)

    def load(self, engine: Engine, device: Device) -> IreeSession:
        request, folder = engine.request, Path(engine.folder)
        if device.is_absent or device.kind != "cpu":
            raise RunError(
                f"{VENDOR}: {request.component}: it runs engines on the processor only, not on "
                f"{device.name}",
                hint="run it with iree-run-module on the machine that has the device",
            )
        _check_built_for_here(request)
        try:
            note, module = read_engine(folder)
            session = IreeSession(
                open_device(self.threads),
                module,
                folder / WEIGHTS_FILE,
                inputs=note.inputs,
                outputs=note.outputs,
                facts={
                    "device": device.name,
                    "precision": request.precision,
                    "runtime": RUNTIME,
                    "driver": driver_for(self.threads),
                    "threads": str(self.threads or "default"),
                    "target": request.target,
                },
            )
        except Exception as error:  # the bindings raise ValueError, RuntimeError and more
            raise CacheError(
                f"{VENDOR}: the engine of {request.component} in {folder} does not open: {error}"
            ) from error
        if any(-1 in spec.shape for spec in note.outputs):
            session.see_output_sizes()
        return session

    def _probe_runtime(self, device: Device) -> str | Rejection:
        hint = "sdkit-dispatch vendors install iree"
        if VERSION != RUNTIME_VERSION:
            return _rejection(
                device,
                "versions",
                f"its compiler is {VERSION} and its runtime {RUNTIME_VERSION}: they must be alike",
                hint,
            )
        try:
            compiler()
            rt.create_hal_module(rt.VmInstance(), open_device(1))
        except Exception as error:  # a broken installation raises anything
            return _rejection(device, "runtime-broken", f"{RUNTIME} does not start: {error}", hint)
        return RUNTIME


def _arch(backend: Backend, device: Device, options: IreeOptions) -> str | Rejection:
    """Returns what a backend compiles for."""
    if backend != "llvm-cpu":
        return device.arch
    levels = levels_of_this_cpu()
    if options.cpu == "auto":
        return levels[0]
    if options.cpu not in levels:
        return _rejection(
            device,
            "isa",
            f"options.iree.cpu is {options.cpu}, and this processor runs {', '.join(levels)}",
            hint=f"set options.iree.cpu: {levels[0]}",
        )
    return options.cpu


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=VENDOR, code=code, reason=reason, hint=hint, device=device.id)


def _check_built_for_here(request: BuildRequest) -> None:
    levels = levels_of_this_cpu()
    here = tuple(target_of("llvm-cpu", level) for level in levels)
    for built, runs in ((request.runtime, (RUNTIME,)), (request.target, here)):
        if built not in runs:
            raise CacheError(
                f'{VENDOR}: the engine of {request.component} was built for "{built}", this runs '
                f'"{", ".join(runs)}"'
            )
