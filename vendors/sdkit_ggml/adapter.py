"""The ggml vendor: our own compiler from ONNX to ggml, for every machine.

An engine is a file of weights and a program that is already lowered and its memory planned; it is
bound to no device, so one engine serves the processor and any GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from sdkit_dispatch.errors import CacheError, CompileError, PipelineError, RunError
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_ggml.compiler.compile import PRECISIONS, compile_model
from sdkit_ggml.engine_files import (
    EXTRA_FILE,
    WEIGHTS_FILE,
    map_weights,
    read_program,
    share_weights,
    write_program,
    write_weights,
)
from sdkit_ggml.program import Program
from sdkit_ggml.runtime.devices import OfferedDevice, find_device, offered_devices
from sdkit_ggml.runtime.executor import Executor, check_variant, suited, thread_count
from sdkit_ggml.runtime.loader import LoadError, Runtime, load_runtime
from sdkit_ggml.runtime.self_test import fault_of
from sdkit_ggml.session import GgmlSession
from sdkit_ggml.weight_swap import other_weights

logger = logging.getLogger(__name__)

_INSTALL = "sdkit-dispatch vendors install ggml"
_BEST: Mapping[str, Precision] = {"cpu": "fp32", "integrated": "fp16", "discrete": "fp16"}
"""Kind of device -> precision. A GPU's speed is in half precision, and its memory is scarce; on a
processor float16 weights are no faster (15.9 s against 15.2 s a step of SD1.5) and 1e-3 off."""


@dataclass(frozen=True, kw_only=True)
class GgmlOptions:
    """The options of the ggml vendor.

    Attributes:
        block_mb: About how much memory, in MiB, a convolution takes beside its input and output,
            if that is more than a quarter of its input; larger pictures are convolved by blocks of
            rows.
        winograd: Compute 3x3 convolutions in fp32 with a third fewer multiplications, from filters
            that take a third more room.
    """

    block_mb: int = 64
    winograd: bool = True


class GgmlAdapter:
    """Serves processors and GPUs.

    Attributes:
        threads: How many threads sessions on a processor use; None: one a processor. It is no
            option: it changes no engine.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self._tested: dict[str, str] = {}

    def probe(self, device: Device) -> str | Rejection:
        try:
            found = self._find(device)
            if isinstance(found, Rejection):
                return found
            runtime, offered = found
            # A GPU is tried by `plan`, which knows the precision to open it for.
            fault = self._fault_of(runtime, offered) if offered.kind == "cpu" else ""
            if fault:
                return _rejection(device, "wrong-numbers", fault, _INSTALL)
        except Exception as error:  # a broken installation or driver raises anything
            return _rejection(
                device,
                "runtime-broken",
                f"ggml does not run for {device.name}: {error}",
                hint=_INSTALL,
            )
        return runtime.name

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = _options(options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        wanted = precision or _BEST[device.kind]
        if wanted not in PRECISIONS:
            return _rejection(
                device,
                "precision",
                f"it takes weights of {', '.join(PRECISIONS)}, asked for {wanted}",
                hint=f"ask for {_BEST[device.kind]}",
            )
        found = self._find(device)
        if isinstance(found, Rejection):
            return found
        runtime, offered = found
        if offered.kind != "cpu":
            runtime.open_gpu(offered, is_exact=wanted == "fp32")
            try:
                fault = self._fault_of(runtime, offered)
            except Exception as error:  # a broken driver raises anything
                fault = f"{offered.name} does not run: {error}"
            if fault:
                return _rejection(device, "wrong-numbers", fault, _INSTALL)
        return Plan(
            vendor="ggml",
            device=device,
            precision=wanted,
            runtime=probed,
            options=asdict(chosen),
            reasons=(
                f"{runtime.name} of {runtime.provider.name} runs on {offered.words}, "
                f"with weights of {wanted}",
                *runtime.notes,
                "engines run on any device",
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
        options = _options(request.options)
        component = request.component
        report(Progress(phase=f"read {component}"))
        if request.precision not in PRECISIONS:
            raise CompileError(f"ggml: {component}: there are no weights of {request.precision}")
        model = make_static(onnx, request.shapes)
        written = f"write the weights of {component}"

        def writing(done: float) -> None:
            report(Progress(phase=written, fraction=done))

        try:
            if self._swap(request, model, onnx, out, siblings, writing):
                return
            lender, shared = _lender(request, siblings)
            compiled = compile_model(
                model,
                onnx.parent,
                component=component,
                shared=shared,
                precision=request.precision,
                block_bytes=options.block_mb << 20,
                has_winograd=options.winograd,
                report=lambda phase: report(Progress(phase=f"{phase} {component}")),
            )
            for variant in compiled.program.variants:
                check_variant(variant, compiled.program.all_weights_bytes)
                logger.info(
                    "ggml: %s (%s): %d operations, %d of them copies, %.0f MiB to compute in",
                    component,
                    variant.name,
                    variant.nodes,
                    variant.copies,
                    variant.arena_bytes / (1 << 20),
                )
            if compiled.weights is not None:
                write_weights(out / WEIGHTS_FILE, compiled.weights, writing)
            elif lender is not None and not share_weights(Path(lender.folder), out):
                # It was removed from the store meanwhile.
                self.compile(request, onnx, out, device=device, report=report)
                return
            if compiled.extras:
                write_weights(out / EXTRA_FILE, compiled.extras, writing)
            write_program(out, compiled.program)
        except (CompileError, PipelineError):
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CompileError(f"ggml: {component}: {type(error).__name__}: {error}") from error

    def load(self, engine: Engine, device: Device) -> GgmlSession:
        request, folder = engine.request, Path(engine.folder)
        found = self._find(device)
        if isinstance(found, Rejection):
            raise RunError(f"ggml: {request.component}: {found.reason}", found.hint)
        runtime, offered = found
        _check_built_for_here(request, runtime)
        try:
            program = read_program(folder)
            for variant in suited(program, offered):
                check_variant(variant, program.all_weights_bytes)
            weights = map_weights(folder, program)
        except Exception as error:  # a damaged file makes any of the readers raise anything
            raise CacheError(
                f"ggml: the engine of {request.component} in {folder} does not open: {error}"
            ) from error
        threads = thread_count(self.threads)
        is_exact = request.precision == "fp32"
        is_as_asked = (
            offered.kind == "cpu"
            or runtime.open_gpu(offered, is_exact=is_exact) == is_exact
            or not is_exact
        )
        if not is_as_asked:
            logger.warning(
                "ggml: %s was opened for half precision in this process; %s runs so too",
                offered.name,
                request.component,
            )
        executor = Executor(runtime.library, offered, program, weights, threads=threads)
        facts = {
            "device": offered.description or offered.name,
            "ggml_device": offered.name,
            "precision": program.precision if is_as_asked else "fp16",
            "runtime": runtime.name,
            "provider": runtime.provider.name,
            "variant": executor.variant.name,
            "nodes": str(executor.variant.nodes),
            "copies": str(executor.variant.copies),
            "arena_bytes": str(executor.variant.arena_bytes),
            "weights_bytes": str(program.all_weights_bytes),
        }
        if offered.kind == "cpu":
            facts |= {"threads": str(threads), "cpu_variant": runtime.cpu_variant or "one"}
        return GgmlSession(program, executor, facts)

    def emit(self, engine: Engine, out: Path) -> None:
        # Only here: loading an engine needs none of it.
        from sdkit_ggml.emit.program_folder import write_program

        write_program(engine, out)

    @staticmethod
    def _swap(
        request: BuildRequest,
        model: ModelProto,
        onnx: Path,
        out: Path,
        siblings: Sequence[Engine],
        report: Callable[[float], None],
    ) -> bool:
        """Writes an engine with the program of one that differs in the weights alone."""
        for sibling in siblings:
            if dict(sibling.request.shapes) != dict(request.shapes):
                continue
            program = _program_of(sibling)
            weights = (
                None
                if program is None
                else other_weights(program, model, onnx.parent, Path(sibling.folder))
            )
            if program is not None and weights is not None:
                logger.info("ggml: %s keeps the program of %s", request.component, sibling.key[:12])
                write_weights(out / WEIGHTS_FILE, weights, report)
                write_program(out, program)
                return True
        return False

    def _fault_of(self, runtime: Runtime, offered: OfferedDevice) -> str:
        """Returns what the device computes wrongly, or ""; asks it once."""
        if offered.name not in self._tested:
            fault = fault_of(runtime.library, offered)
            where = f"{runtime.name} of {runtime.provider.name} on {offered.name}"
            self._tested[offered.name] = f"{where}: {fault}" if fault else ""
        return self._tested[offered.name]

    def _find(self, device: Device) -> tuple[Runtime, OfferedDevice] | Rejection:
        if device.is_absent:
            return _rejection(device, "absent-device", "it is not a device of this machine")
        if device.kind not in _BEST:
            return _rejection(
                device, "device-kind", f"ggml has no backend for a device of kind {device.kind}"
            )
        try:
            runtime = load_runtime()
        except LoadError as error:
            return _rejection(device, "no-ggml", str(error), hint=_INSTALL)
        if device.kind != "cpu":
            runtime.load_gpu_backends()
        offered = offered_devices(runtime.library)
        found = find_device(device, offered)
        if found is None:
            return _not_offered(device, runtime, offered)
        return runtime, found


def _lender(
    request: BuildRequest, siblings: Sequence[Engine]
) -> tuple[Engine, Program] | tuple[None, None]:
    """Returns an engine of the same weights, whose file of them may serve another size too."""
    for sibling in siblings:
        if sibling.request.weights_digest == request.weights_digest:
            program = _program_of(sibling)
            if program is not None:
                return sibling, program
    return None, None


def _program_of(engine: Engine) -> Program | None:
    """Returns the program of an engine that was built before, if it can be used."""
    try:
        program = read_program(Path(engine.folder))
        map_weights(Path(engine.folder), program)
    except Exception as error:  # a damaged file makes any of the readers raise anything
        logger.warning("ggml: %s cannot be built upon: %s", engine.folder, error)
        return None
    return program


def _options(given: Mapping[str, Any]) -> GgmlOptions:
    return options_from_mapping(GgmlOptions, "ggml", given)


def _not_offered(device: Device, runtime: Runtime, offered: tuple[OfferedDevice, ...]) -> Rejection:
    seen = "; ".join(one.words for one in offered)
    loaded = ", ".join(runtime.backends)
    told = runtime.failures.values()
    return _rejection(
        device,
        "device-not-found",
        f"{runtime.name} of {runtime.provider.name} (backends: {loaded}) does not see "
        f"{device.name}; it sees {seen}"
        + "".join(f"; {words}" for words in (*told, *runtime.notes)),
        hint="install the device's Vulkan driver",
    )


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor="ggml", code=code, reason=reason, hint=hint, device=device.id)


def _check_built_for_here(request: BuildRequest, runtime: Runtime) -> None:
    for built, here in ((request.runtime, runtime.name), (request.target, "")):
        if built != here:
            raise CacheError(
                f'ggml: the engine of {request.component} was built for "{built}", this is "{here}"'
            )
