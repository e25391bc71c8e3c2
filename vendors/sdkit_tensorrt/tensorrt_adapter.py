"""The vendor tensorrt: engines are tuned on the card itself, and bound to it.

Neither its builder nor its runtime has run here: its wheels come from NVIDIA's own index and need
a card. What is tested, is tested with a stub; the rest waits in tests/device.
"""

from __future__ import annotations

import logging
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
from sdkit_tensorrt.builder_log import Lines, Runtime, new_log
from sdkit_tensorrt.building import Blueprint, build_plan, prepare
from sdkit_tensorrt.compiled import note_of
from sdkit_tensorrt.device_memory import CardMemory
from sdkit_tensorrt.driver import Card, find_card
from sdkit_tensorrt.engine_files import PLAN_FILE, EngineNote, read_note, write_note
from sdkit_tensorrt.opened_engine import open_engine
from sdkit_tensorrt.options import TensorRtOptions
from sdkit_tensorrt.profiles import profile_holding, resized
from sdkit_tensorrt.refitting import refitted
from sdkit_tensorrt.session import TensorRtSession
from sdkit_tensorrt.timing_cache import TimingCache
from sdkit_tensorrt.undisturbed import undisturbed
from sdkit_tensorrt.weight_streaming import stream_weights

logger = logging.getLogger(__name__)

VENDOR = "tensorrt"
WORKSHOP = "workshop"
LEAST_ARCH, LEAST_BF16_ARCH, LEAST_FP8_ARCH = 75, 80, 89
"""Compute capabilities. Source: the support matrix of TensorRT 11."""
_LEVELS = {
    "none": "NONE",
    "ampere_plus": "AMPERE_PLUS",
    "same_compute_capability": "SAME_COMPUTE_CAPABILITY",
}
_INSTALL = (
    "install tensorrt-cu13-libs from NVIDIA's own package index (PyPI has the bindings only), or "
    "take --vendor tensorrt-rtx, which PyPI has whole"
)


class TensorRtAdapter:
    """Serves the NVIDIA cards of this machine, from Turing on.

    Attributes:
        threads: Set by the worker; nothing here uses threads.
        warm_up: Whether `load` runs an engine once.
        scratch: A folder for timings that may be lost; None keeps none.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.warm_up = True
        self.scratch: Path | None = None

    def probe(self, device: Device) -> str | Rejection:
        answer = self._ready(device)
        return answer if isinstance(answer, Rejection) else _runtime_name(answer[0])

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(TensorRtOptions, VENDOR, options)
        check_ranges(VENDOR, chosen.profiles, options)
        ready = self._ready(device)
        if isinstance(ready, Rejection):
            return ready
        trt, card = ready
        usable: tuple[Precision, ...] = ("fp16", "fp32", "int8")
        if _number(card.arch) >= LEAST_BF16_ARCH:
            usable = ("fp16", "bf16", "fp32", "int8")
        if precision is not None and precision not in usable:
            return _rejection(
                device,
                "precision",
                f"it computes in {', '.join(usable)} on {card.arch}, asked for {precision}",
                hint=f"ask for {usable[0]}",
            )
        wanted = precision or usable[0]
        target = target_of(card, chosen)
        return Plan(
            vendor=VENDOR,
            device=device,
            precision=wanted,
            target=target,
            runtime=_runtime_name(trt),
            options=asdict(chosen),
            ranges=plan_ranges(chosen.profiles),
            reasons=(
                f"TensorRT {trt.__version__} tunes on {card.name} itself, in {wanted}",
                f"engines are bound to {target}",
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
        options = options_from_mapping(TensorRtOptions, VENDOR, request.options)
        ready = self._ready(device)
        if isinstance(ready, Rejection):
            raise CompileError(f"{VENDOR}: {request.component}: {ready.reason}", ready.hint)
        trt, card = ready
        blueprint = Blueprint(
            who=request.runtime,
            component=request.component,
            onnx=onnx,
            shapes=request.shapes,
            precision=request.precision,
            ranges=options.profiles.get(request.component, ()),
            keep_fp32=options.keep_fp32,
            has_fp8=_number(card.arch) >= LEAST_FP8_ARCH,
            must_fit=not options.force,
        )
        timings = TimingCache(self.scratch, request.runtime, card)

        def configure(config: Any, log: Any) -> None:  # Any: of the bindings
            level = _LEVELS[options.hardware_compatibility]
            config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
            config.builder_optimization_level = options.optimization_level
            if options.weight_streaming:
                config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
            if options.refit:
                config.set_flag(trt.BuilderFlag.REFIT)
            timings.open(config)

        workshop = out / WORKSHOP
        workshop.mkdir()
        try:
            prepared = prepare(blueprint, workshop, report)
            if options.refit:
                note = refitted(
                    trt, prepared, request=request, siblings=siblings, out=out, report=report
                )
                if note is not None:
                    write_note(out, note)
                    return
            built = build_plan(trt, prepared, report, configure=configure)
        finally:
            shutil.rmtree(workshop)
        timings.keep()
        plan = out / PLAN_FILE
        with plan.open("wb") as stream:
            stream.write(memoryview(built.plan))
        write_note(out, note_of(built, request.shapes, plan.stat().st_size))

    def load(self, engine: Engine, device: Device) -> TensorRtSession:
        request, folder = engine.request, Path(engine.folder)
        try:
            note = read_note(folder)
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{VENDOR}: the engine of {request.component} in {folder} does not open: {error}"
            ) from error
        ready = self._ready(device)
        if isinstance(ready, Rejection):
            raise RunError(f"{VENDOR}: {request.component}: {ready.reason}", ready.hint)
        trt, card = ready
        options = options_from_mapping(TensorRtOptions, VENDOR, request.options)
        for built, here in (
            (request.runtime, _runtime_name(trt)),
            (request.target, target_of(card, options)),
        ):
            if built != here:
                raise CacheError(
                    f'{VENDOR}: the engine of {request.component} was built for "{built}", this '
                    f'is "{here}"'
                )
        with undisturbed():
            session = self._open(trt, engine, note, card)
        if self.warm_up:
            session.warm_up()
        return session

    def _open(self, trt: Runtime, engine: Engine, note: EngineNote, card: Card) -> TensorRtSession:
        """Opens an engine on a card. Not run on hardware yet: tests/device does."""
        request = engine.request
        index = profile_holding(note.profiles, engine.shapes) if note.profiles else 0
        if index is None:
            raise CacheError(f"{VENDOR}: no profile of {request.component} holds its sizes")
        lines = Lines()
        log = new_log(trt, lines)
        memory = CardMemory(card.ordinal)
        try:
            runtime = trt.Runtime(log)
            opened = open_engine(trt, runtime, Path(engine.folder) / PLAN_FILE, lines, who=VENDOR)
            facts = {
                "device": card.name,
                "precision": request.precision,
                "runtime": request.runtime,
                "target": request.target,
                "profile": str(index) if note.profiles else "static",
                **stream_weights(opened, memory),
            }
            context = opened.create_execution_context()
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
                on_close=lambda: None,
                keep_alive=(opened, runtime, log),
            )
        except BaseException:
            memory.close()
            raise

    def _ready(self, device: Device) -> tuple[Runtime, Card] | Rejection:
        """Returns the runtime and the card, or why they cannot be used; asks the driver first.

        TensorRT 11 without a driver gives objects whose use ends the process.
        """
        if device.maker != "nvidia":
            return _rejection(device, "arch", f"it serves NVIDIA cards, not {device.name}")
        if device.is_absent:
            return _rejection(
                device,
                "absent-device",
                "it tunes on the card itself, and it is absent",
                hint="--vendor tensorrt-rtx builds for absent cards",
            )
        card = find_card(device, cuda_major=cuda_major())
        if isinstance(card, Problem):
            return _rejection(device, card.code, card.message, card.hint)
        if _number(card.arch) < LEAST_ARCH:
            return _rejection(
                device, "arch", f"{card.name} is {card.arch}, it serves sm_75 and newer"
            )
        try:
            import tensorrt_bindings as trt

            with undisturbed():
                trt.Builder(new_log(trt, Lines()))
        except ImportError as error:
            return _rejection(
                device, "runtime-broken", f"TensorRT does not load: {error}", _INSTALL
            )
        except TypeError as error:  # what the bindings make of a null pointer
            return _rejection(
                device,
                "runtime-broken",
                f"TensorRT {trt.__version__} cannot use the driver or the card: {error}",
                hint="check `nvidia-smi`",
            )
        return trt, card


def target_of(card: Card, options: TensorRtOptions) -> str:
    """Returns what an engine is bound to.

    Without hardware compatibility that is the model of the card: engines tuned on 188
    multiprocessors were seen to hang on fewer of the same architecture.
    """
    system = f"os={sys.platform}-{platform.machine().lower()}"
    level = options.hardware_compatibility
    if level == "ampere_plus":
        return f"sm_80+;{system};hw={level}"
    if level == "same_compute_capability":
        return f"{card.arch};{system};hw={level}"
    return f"{card.arch};{system};card={card.name};multiprocessors={card.processors}"


def cuda_major() -> int:
    """Returns the CUDA version that the installed runtime was built with."""
    for major in (13, 12):
        try:
            version(f"tensorrt-cu{major}-libs")
        except PackageNotFoundError:
            continue
        return major
    return 13


def _runtime_name(trt: Runtime) -> str:
    return f"tensorrt {trt.__version__}"


def _number(arch: str) -> int:
    digits = arch.removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=VENDOR, code=code, reason=reason, hint=hint, device=device.id)
