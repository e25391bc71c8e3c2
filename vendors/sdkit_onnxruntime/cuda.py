"""The `cuda` vendor: ONNX Runtime's CUDA execution provider.

An engine is the graph in the precision that was asked for; kernels are chosen when it is loaded.
Not run on hardware yet: what is tested is that nothing runs on the processor in its name.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

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
from sdkit_dispatch.errors import CacheError, RunError
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_onnxruntime.gpu_engine import check_files, specs_of, write_engine
from sdkit_onnxruntime.gpu_refusals import CUDA, meaning_of
from sdkit_onnxruntime.gpu_session import GRAPH_FILE, flops_of_file, one_node_model, open_on
from sdkit_onnxruntime.session import OrtSession

logger = logging.getLogger(__name__)

VENDOR = "cuda"
PROVIDER = "CUDAExecutionProvider"
RUNTIME = f"onnxruntime-gpu {ort.__version__}"
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32")
"""The best first. Its kernels for bfloat16 are too few for a diffusion model."""


@dataclass(frozen=True, kw_only=True)
class CudaOptions:
    """The options of the cuda vendor.

    Attributes:
        keep_fp32: Shell patterns over node names and operator types that compute in float32.
        allow_cpu_nodes: Let the processor run nodes that are no heavy arithmetic.
    """

    keep_fp32: tuple[str, ...] = ()
    allow_cpu_nodes: bool = False


class CudaAdapter:
    """Serves NVIDIA's cards.

    Attributes:
        threads: Of the processor's part; None leaves it to the runtime.
        warm_up: Whether `load` runs an engine once: kernels are chosen in the first run.
    """

    def __init__(self) -> None:
        ort.disable_telemetry_events()
        self.threads: int | None = None
        self.warm_up = True
        _preload_libraries()

    def probe(self, device: Device) -> str | Rejection:
        if device.maker != "nvidia":
            return _rejection(device, "arch", f"it serves NVIDIA cards, not {device.name}")
        if device.is_absent:
            return _rejection(
                device,
                "absent-device",
                "it compiles when an engine is loaded, on the card itself, and it is absent",
                hint="--vendor tensorrt-rtx builds for absent cards",
            )
        if PROVIDER not in ort.get_available_providers():
            return _rejection(
                device,
                "no-provider",
                f"{RUNTIME} offers {', '.join(ort.get_available_providers())}, not {PROVIDER}",
                hint="sdkit-dispatch vendors install cuda",
            )
        try:
            open_on(PROVIDER, _options_for(device, "fp32"), one_node_model(), is_strict=True)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            code, reason, hint = why(error)
            return _rejection(device, code, reason, hint)
        return RUNTIME

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(CudaOptions, VENDOR, options)
        probed = self.probe(device)
        if isinstance(probed, Rejection):
            return probed
        wanted = precision or PRECISIONS[0]
        if wanted not in PRECISIONS:
            return _rejection(
                device,
                "precision",
                f"it computes in {', '.join(PRECISIONS)}, asked for {wanted}",
                hint=f"ask for {PRECISIONS[0]}",
            )
        return Plan(
            vendor=VENDOR,
            device=device,
            precision=wanted,
            runtime=RUNTIME,
            options=asdict(chosen),
            reasons=(f"{RUNTIME} runs on {device.name} in {wanted}",),
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
        options = options_from_mapping(CudaOptions, VENDOR, request.options)
        write_engine(request, onnx, out, report, keep=options.keep_fp32)
        report(Progress(phase=f"write {request.component}", fraction=1.0))

    def load(self, engine: Engine, device: Device) -> OrtSession:
        request, folder = engine.request, Path(engine.folder)
        graph = check_files(VENDOR, request.component, folder)
        if request.runtime != RUNTIME:
            raise CacheError(
                f"{VENDOR}: the engine of {request.component} was built by {request.runtime}, "
                f"this is {RUNTIME}"
            )
        options = options_from_mapping(CudaOptions, VENDOR, request.options)
        path = folder / GRAPH_FILE
        try:
            session, placement = open_on(
                PROVIDER,
                _options_for(device, request.precision),
                str(path),
                is_strict=not options.allow_cpu_nodes,
                flops=flops_of_file(path),
                threads=self.threads,
            )
            inputs, outputs = specs_of(graph, session)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            code, reason, hint = why(error)
            if code == "runtime":
                raise CacheError(
                    f"{VENDOR}: the engine of {request.component} in {folder} does not open: "
                    f"{reason}"
                ) from error
            raise RunError(f"{VENDOR}: {request.component}: {reason}", hint) from error
        facts = {
            "device": device.name,
            "precision": request.precision,
            "runtime": RUNTIME,
            "provider": PROVIDER,
            **placement.facts(PROVIDER),
        }
        loaded = OrtSession(VENDOR, session, inputs, outputs, facts)
        if self.warm_up:
            loaded.warm_up()
        return loaded


def why(error: Exception) -> tuple[str, str, str]:
    """Returns code, reason and remedy for what ONNX Runtime raised.

    It says only "assigned to the processor" where CUDA did not load; what did not is in the log of
    its own, so the provider's library is loaded once more by itself, to hear why.
    """
    words = str(error)
    found = meaning_of(words, CUDA)
    if found is None:
        return "runtime", f"{RUNTIME}: {words}", ""
    if found.code == "on-cpu":
        complaint = _complaint_of_library()
        deeper = meaning_of(complaint, CUDA)
        if deeper is not None:
            return deeper.code, deeper.reason, deeper.hint
        return found.code, f"{found.reason}: {complaint or words}", found.hint
    return found.code, f"{found.reason} ({words})", found.hint


def _complaint_of_library() -> str:
    folder = Path(ort.__file__).parent / "capi"
    prefix, suffix = ("", ".dll") if sys.platform == "win32" else ("lib", ".so")
    mode = getattr(ctypes, "RTLD_GLOBAL", 0)
    for name in ("onnxruntime_providers_shared", "onnxruntime_providers_cuda"):
        try:
            ctypes.CDLL(str(folder / f"{prefix}{name}{suffix}"), mode=mode)
        except OSError as error:
            return str(error)
    return ""


def _preload_libraries() -> None:
    """Loads CUDA and cuDNN from where pip put them: no search path leads there."""
    try:
        ort.preload_dlls()
    except Exception as error:  # it is a convenience; the provider will say what is missing
        logger.info("CUDA's libraries were not loaded ahead: %s", error)


def _options_for(device: Device, precision: str) -> dict[str, str]:
    return {
        "device_id": str(_ordinal(device.pci_address)),
        # fp32 is fp32: TF32 has 10 bits of mantissa.
        "use_tf32": "0" if precision == "fp32" else "1",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
    }


def _ordinal(pci_address: str) -> int:
    """Returns CUDA's number of a card; 0 where there is no driver to ask."""
    if not pci_address:
        return 0
    try:
        if sys.platform == "win32":
            library = ctypes.WinDLL("nvcuda.dll")
        else:
            library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuInit(0) == 0:
            library.cuDeviceGetByPCIBusId(ctypes.byref(number), pci_address.encode())
        return number.value
    except OSError:
        return 0


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=VENDOR, code=code, reason=reason, hint=hint, device=device.id)
