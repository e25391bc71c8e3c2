"""The vendor tensorrt-rtx: engines are compiled ahead of time, on any machine, for named cards."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tensorrt_rtx_bindings as trt

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Problem,
    Rejection,
    Report,
)
from sdkit_dispatch.errors import CacheError, CompileError, RunError
from sdkit_dispatch.graph.size_ranges import check_ranges, plan_ranges
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_tensorrt.builder_log import Lines, new_log
from sdkit_tensorrt.building import Blueprint, Built, build_plan, prepare
from sdkit_tensorrt.compiled import note_of
from sdkit_tensorrt.device_memory import CardMemory
from sdkit_tensorrt.driver import Card, find_card
from sdkit_tensorrt.engine_files import PLAN_FILE, EngineNote, read_note, write_note
from sdkit_tensorrt.opened_engine import open_engine
from sdkit_tensorrt.options import RtxOptions
from sdkit_tensorrt.plan_header import differences, read_plan_header
from sdkit_tensorrt.profiles import profile_holding, resized
from sdkit_tensorrt.refitting import refitted
from sdkit_tensorrt.runtime_cache import cache_file, fill_cache, keep_cache
from sdkit_tensorrt.session import TensorRtSession
from sdkit_tensorrt.targets import TARGETS, archs_of, target_of, why_refused
from sdkit_tensorrt.undisturbed import undisturbed
from sdkit_tensorrt.weight_streaming import stream_weights

logger = logging.getLogger(__name__)

VENDOR = "tensorrt-rtx"
VERSION = str(trt.__version__)
RUNTIME = f"{VENDOR} {VERSION}"
WORKSHOP = "workshop"


class RtxAdapter:
    """Serves NVIDIA cards from Turing on, present or absent.

    Attributes:
        threads: Set by the worker; nothing here uses threads.
        warm_up: Whether `load` runs an engine once: kernels are compiled in the first run.
        cuda_graphs: Whether whole runs are recorded and played back.
        scratch: A folder for compiled kernels that may be lost; None keeps none.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.warm_up = True
        self.cuda_graphs = True
        self.scratch: Path | None = None

    def probe(self, device: Device) -> str | Rejection:
        archs = archs_of(device.arch)
        if device.maker != "nvidia" or not archs:
            what = device.arch or "a card of unknown architecture"
            return _rejection(
                device, "arch", f"it serves NVIDIA cards, and {device.name} is {what}"
            )
        for arch in archs:
            reason, hint = why_refused(arch, is_forced=True)
            if reason:
                return _rejection(device, "arch", reason, hint)
        if device.is_absent:
            return RUNTIME  # it compiles without a card
        card = find_card(device, cuda_major=cuda_major())
        if isinstance(card, Problem):
            return _rejection(device, card.code, card.message, card.hint)
        if card.arch != device.arch:
            return _rejection(
                device, "arch", f"{card.name} is {card.arch} for the driver, not {device.arch}"
            )
        return RUNTIME

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(RtxOptions, VENDOR, options)
        check_ranges(VENDOR, chosen.profiles, options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        archs = archs_of(device.arch)
        cautions = []
        for arch in archs:
            reason, hint = why_refused(arch, is_forced=chosen.force)
            if reason:
                return _rejection(device, "arch", reason, hint)
            if TARGETS[arch].caution:
                cautions.append(f"{arch}: {TARGETS[arch].caution}")
        if chosen.refit and device.is_absent:
            return _rejection(
                device,
                "refit",
                f"an engine that takes other weights is built on its card, and {device.name} is "
                "absent",
                hint=f"set options.{VENDOR}.refit: false in the profile",
            )
        shared = [
            one
            for one in TARGETS[archs[0]].precisions
            if all(one in TARGETS[arch].precisions for arch in archs)
        ]
        if precision is not None and precision not in shared:
            return _rejection(
                device,
                "precision",
                f"it computes in {', '.join(shared)} on {', '.join(archs)}, asked for {precision}",
                hint=f"ask for {shared[0]}",
            )
        wanted = precision or shared[0]
        listed = ", ".join(archs)
        return Plan(
            vendor=VENDOR,
            device=device,
            precision=wanted,
            target=target_of(archs),
            runtime=RUNTIME,
            options=asdict(chosen),
            ranges=plan_ranges(chosen.profiles),
            reasons=(
                f"TensorRT-RTX {VERSION} compiles ahead of time for {listed}, in {wanted}",
                *cautions,
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
        options = options_from_mapping(RtxOptions, VENDOR, request.options)
        archs = archs_of(request.target)
        for arch in archs:
            reason, hint = why_refused(arch, is_forced=options.force)
            if reason:
                raise CompileError(f"{VENDOR}: {request.component}: {reason}", hint)
        if not archs:
            raise CompileError(
                f"{VENDOR}: {request.component}: the request names no target",
                hint="build with --for sm_89",
            )
        blueprint = Blueprint(
            who=RUNTIME,
            component=request.component,
            onnx=onnx,
            shapes=request.shapes,
            precision=request.precision,
            ranges=options.profiles.get(request.component, ()),
            keep_fp32=options.keep_fp32,
            has_fp8=all(TARGETS[arch].has_fp8 for arch in archs),
            must_fit=not options.force,
        )

        def configure(config: Any, log: Any) -> None:  # Any: of the bindings
            # Never the default set: FP8 builds for it silently, for cards that have none.
            config.num_compute_capabilities = len(archs)
            for index, arch in enumerate(archs):
                capability = getattr(trt.ComputeCapability, TARGETS[arch].capability)
                if not config.set_compute_capability(capability, index):
                    raise CompileError(f"{RUNTIME} does not know {arch}")
            if options.weight_streaming:
                config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
            if options.refit:
                config.set_flag(trt.BuilderFlag.REFIT)

        workshop = out / WORKSHOP
        workshop.mkdir()
        try:
            prepared = prepare(blueprint, workshop, report)
            if options.refit and _is_here(device):
                note = refitted(
                    trt, prepared, request=request, siblings=siblings, out=out, report=report
                )
                if note is not None:
                    _check_plan(out / PLAN_FILE, request)
                    write_note(out, note)
                    return
            built = build_plan(trt, prepared, report, configure=configure)
        finally:
            shutil.rmtree(workshop)
        _write(built, request, out)

    def load(self, engine: Engine, device: Device) -> TensorRtSession:
        request, folder = engine.request, Path(engine.folder)
        note = _checked_files(request, folder)
        _check_built_for_here(request, device)
        card = find_card(device, cuda_major=cuda_major())
        if isinstance(card, Problem):
            # Asked before the runtime is: its validity check calls every plan invalid without one.
            raise RunError(f"{VENDOR}: {request.component}: {card.message}", card.hint)
        with undisturbed():
            session = self._open(engine, note, card)
        if self.warm_up:
            session.warm_up()
        return session

    def _open(self, engine: Engine, note: EngineNote, card: Card) -> TensorRtSession:
        """Opens an engine on a card. Not run on hardware yet: tests/device does."""
        request, plan = engine.request, Path(engine.folder) / PLAN_FILE
        index = 0
        if note.profiles:
            chosen = profile_holding(note.profiles, engine.shapes)
            if chosen is None:
                raise CacheError(f"{VENDOR}: no profile of {request.component} holds its sizes")
            index = chosen
        lines = Lines()
        log = new_log(trt, lines)
        memory = CardMemory(card.ordinal)
        try:
            runtime = trt.Runtime(log)
            opened = open_engine(trt, runtime, plan, lines, who=VENDOR)
            facts = {
                "device": card.name,
                "precision": request.precision,
                "runtime": RUNTIME,
                "target": request.target,
                "profile": str(index) if note.profiles else "static",
            }
            facts |= stream_weights(opened, memory)
            config = opened.create_runtime_config()
            cache = config.create_runtime_cache()
            path = cache_file(self.scratch, engine.key, RUNTIME, card.arch)
            facts["runtime_cache"] = "hit" if fill_cache(cache, path) else "miss"
            config.set_runtime_cache(cache)
            if self.cuda_graphs:
                config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            facts["cuda_graphs"] = "on" if self.cuda_graphs else "off"
            context = opened.create_execution_context(config)
            if context is None:
                raise RunError(f"{VENDOR}: {request.component}: {lines.words}")
            return TensorRtSession(
                trt,
                context,
                memory,
                inputs=resized(note.inputs, engine.shapes),
                outputs=note.outputs,
                profile=index,
                facts=facts,
                lines=lines,
                on_close=lambda: keep_cache(cache, path),
                keep_alive=(cache, config, opened, runtime, log),
            )
        except BaseException:
            memory.close()
            raise


def cuda_major() -> int:
    """Returns the CUDA version that the installed runtime was built with."""
    for major in (13, 12):
        try:
            version(f"tensorrt-rtx-cu{major}-libs")
        except PackageNotFoundError:
            continue
        return major
    return 13


def _is_here(device: Device) -> bool:
    if device.is_absent:
        return False
    return not isinstance(find_card(device, cuda_major=cuda_major()), Problem)


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=VENDOR, code=code, reason=reason, hint=hint, device=device.id)


def _write(built: Built, request: BuildRequest, out: Path) -> None:
    plan = out / PLAN_FILE
    with plan.open("wb") as stream:
        stream.write(memoryview(built.plan))
    _check_plan(plan, request)
    write_note(out, note_of(built, request.shapes, plan.stat().st_size))


def _check_plan(plan: Path, request: BuildRequest) -> None:
    try:
        header = read_plan_header(plan)
    except ValueError as error:
        raise CompileError(f"{RUNTIME} made no plan of {request.component}: {error}") from error
    wrong = differences(header, version=VERSION, archs=archs_of(request.target))
    if wrong:
        raise CompileError(f"{RUNTIME} made another plan of {request.component}: {wrong}")


def _checked_files(request: BuildRequest, folder: Path) -> EngineNote:
    try:
        note = read_note(folder)
        header = read_plan_header(folder / PLAN_FILE)
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{VENDOR}: the engine of {request.component} in {folder} does not open: {error}"
        ) from error
    if request.runtime != RUNTIME:
        raise CacheError(
            f"{VENDOR}: the engine of {request.component} was built by {request.runtime}, this "
            f"is {RUNTIME}"
        )
    wrong = differences(header, version=VERSION, archs=archs_of(request.target))
    if wrong:
        raise CacheError(f"{VENDOR}: the engine of {request.component} in {folder}: {wrong}")
    return note


def _check_built_for_here(request: BuildRequest, device: Device) -> None:
    if device.is_absent:
        raise RunError(
            f"{VENDOR}: {device.name} is not in this machine: engines for it are built, not run",
            hint="copy the engine store to the machine that has the card",
        )
    if device.arch not in archs_of(request.target):
        raise CacheError(
            f"{VENDOR}: the engine of {request.component} was built for {request.target}, "
            f"{device.name} is {device.arch}"
        )
