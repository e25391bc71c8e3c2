"""The `migraphx` vendor: AMD's compiler through ONNX Runtime, for machines that have ROCm.

An engine is the graph in the precision that was asked for, and a folder of its own with the
programs that MIGraphX compiled: the provider's cache gives programs of other weights, precisions
and shapes where two models share a folder (seen with 1.27.1). Not run on hardware yet.
"""

from __future__ import annotations

import json
import logging
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
from sdkit_dispatch.errors import CacheError, CompileError, RunError, UnsupportedOpError
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_onnxruntime.gpu_engine import check_files, specs_of, write_engine
from sdkit_onnxruntime.gpu_refusals import MIGRAPHX, Meaning, meaning_of
from sdkit_onnxruntime.gpu_session import GRAPH_FILE, flops_of_file, one_node_model, open_on
from sdkit_onnxruntime.migraphx_graph import check_graph
from sdkit_onnxruntime.migraphx_parser import ask_parser
from sdkit_onnxruntime.mxr import mxr_header
from sdkit_onnxruntime.placement import Placement
from sdkit_onnxruntime.rocm import card_number, load_libraries, scrub_environment, versions
from sdkit_onnxruntime.session import OrtSession

logger = logging.getLogger(__name__)

VENDOR = "migraphx"
RUNTIME = f"onnxruntime-migraphx {ort.__version__}"
PROGRAMS_FOLDER = "programs"
NOTE_FILE = "programs.json"
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")

PROVIDERS: Mapping[str, Mapping[str, str]] = {
    # Execution provider -> our option -> its name there.
    "MIGraphXExecutionProvider": {
        "card": "device_id",
        "programs": "migraphx_model_cache_dir",
        "tune": "migraphx_exhaustive_tune",
    },
    # The plugin that comes after it: ROCm 7.14 is the last with the one above.
    # Source: onnxruntime/onnxruntime-ep-amdgpu, 2026-08-21.
    "AMDGPUExecutionProvider": {
        "card": "device_id",
        "programs": "cache_dir",
        "tune": "exhaustive_tune",
    },
}


@dataclass(frozen=True, kw_only=True)
class MigraphxOptions:
    """The options of the migraphx vendor.

    Attributes:
        exhaustive_tune: Try every kernel: compiling takes much longer.
        keep_fp32: Shell patterns over node names and operator types that compute in float32.
    """

    exhaustive_tune: bool = False
    keep_fp32: tuple[str, ...] = ()


class MigraphxAdapter:
    """Serves AMD's cards on Linux.

    Attributes:
        threads: Of the processor's part; None leaves it to the runtime.
        warm_up: Whether `load` runs an engine once.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.warm_up = True
        scrub_environment()
        self._libraries = load_libraries()

    def probe(self, device: Device) -> str | Rejection:
        if device.maker != "amd":
            return _rejection(device, "arch", f"it serves AMD's cards, not {device.name}")
        if device.is_absent:
            return _rejection(
                device, "absent-device", "it compiles on the card itself, and it is absent"
            )
        provider = offered_provider()
        if not provider:
            return _rejection(
                device,
                "no-provider",
                f"{RUNTIME} offers {', '.join(ort.get_available_providers())}, none of "
                f"{', '.join(PROVIDERS)}",
                hint="sdkit-dispatch vendors install migraphx",
            )
        options = provider_options(provider, card=card_number(device.pci_address))
        try:
            open_on(provider, options, one_node_model(), is_strict=True)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            meaning = why(error)
            return _rejection(device, meaning.code, meaning.reason, meaning.hint)
        return RUNTIME

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = options_from_mapping(MigraphxOptions, VENDOR, options)
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
        target = self._target(device)
        return Plan(
            vendor=VENDOR,
            device=device,
            precision=wanted,
            target=target,
            runtime=RUNTIME,
            options=asdict(chosen),
            reasons=(
                f"{RUNTIME} compiles for {device.name} in {wanted}; it takes minutes",
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
        component = request.component
        options = options_from_mapping(MigraphxOptions, VENDOR, request.options)
        check_graph(component, make_static(onnx, request.shapes))
        write_engine(request, onnx, out, report, keep=options.keep_fp32)
        report(Progress(phase=f"parse {component}"))
        ask_parser(component, out / GRAPH_FILE)
        programs = out / PROGRAMS_FOLDER
        programs.mkdir()
        report(Progress(phase=f"compile {component}: minutes, without a word from the compiler"))
        try:
            self._open(request, out, device)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            raise _compile_error(component, error) from error
        _write_note(component, programs, out)
        report(Progress(phase=f"compile {component}", fraction=1.0))

    def load(self, engine: Engine, device: Device) -> OrtSession:
        request, folder = engine.request, Path(engine.folder)
        graph = check_files(VENDOR, request.component, folder)
        before = _check_programs(request.component, folder)
        if device.is_absent or device.maker != "amd":
            raise RunError(f"{VENDOR}: {device.name} is no AMD card of this machine")
        self._check_built_for_here(request, device)
        try:
            session, placement = self._open(request, folder, device)
            inputs, outputs = specs_of(graph, session)
        except Exception as error:  # the bindings raise a dozen classes that share no base
            meaning = why(error)
            if meaning.code == "runtime":
                raise CacheError(
                    f"{VENDOR}: the engine of {request.component} in {folder} does not open: "
                    f"{meaning.reason}"
                ) from error
            message = f"{VENDOR}: {request.component}: {meaning.reason}"
            raise RunError(message, meaning.hint) from error
        after = _programs_in(folder / PROGRAMS_FOLDER)
        if after != before:
            raise CacheError(
                f"{VENDOR}: MIGraphX compiled {request.component} again instead of opening "
                f"{', '.join(before)} in {folder}"
            )
        provider = offered_provider()
        facts = {
            "device": device.name,
            "precision": request.precision,
            "runtime": RUNTIME,
            "provider": provider,
            "target": request.target,
            **placement.facts(provider),
        }
        loaded = OrtSession(VENDOR, session, inputs, outputs, facts)
        if self.warm_up:
            loaded.warm_up()
        return loaded

    def _open(
        self, request: BuildRequest, folder: Path, device: Device
    ) -> tuple[ort.InferenceSession, Placement]:
        """Opens an engine with its own folder of programs: compiles what is not in there."""
        options = options_from_mapping(MigraphxOptions, VENDOR, request.options)
        provider = offered_provider()
        path = folder / GRAPH_FILE
        return open_on(
            provider,
            provider_options(
                provider,
                card=card_number(device.pci_address),
                programs=folder / PROGRAMS_FOLDER,
                tune=options.exhaustive_tune,
            ),
            str(path),
            is_strict=False,
            flops=flops_of_file(path),
            threads=self.threads,
        )

    def _target(self, device: Device) -> str:
        return ";".join(part for part in (device.arch, versions(self._libraries)) if part)

    def _check_built_for_here(self, request: BuildRequest, device: Device) -> None:
        for built, here in (
            (request.runtime, RUNTIME),
            (request.target, self._target(device)),
        ):
            if built != here:
                raise CacheError(
                    f'{VENDOR}: the engine of {request.component} was built for "{built}", this '
                    f'is "{here}"'
                )


def offered_provider() -> str:
    """Returns the execution provider of AMD's that this runtime lists; "" if none.

    That it is listed says nothing of whether it loads.
    """
    offered = ort.get_available_providers()
    return next((name for name in PROVIDERS if name in offered), "")


def provider_options(
    provider: str, *, card: int = 0, programs: Path | None = None, tune: bool = False
) -> dict[str, str]:
    """Returns the options of a provider in its own words."""
    names = PROVIDERS[provider]
    values = {
        "card": str(card),
        "programs": "" if programs is None else str(programs),
        "tune": "1" if tune else "",
    }
    return {names[key]: value for key, value in values.items() if value}


def why(error: Exception) -> Meaning:
    """Returns what ONNX Runtime's or MIGraphX's words mean."""
    words = str(error)
    found = meaning_of(words, MIGRAPHX)
    if found is not None:
        return found
    return Meaning(pattern="", code="runtime", reason=f"{RUNTIME}: {words}", hint="")


def _compile_error(component: str, error: Exception) -> CompileError:
    meaning = why(error)
    kind = UnsupportedOpError if meaning.code == "operator" else CompileError
    return kind(f"{VENDOR} refuses {component}: {meaning.reason}", meaning.hint)


def _programs_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.mxr"))}


def _write_note(component: str, programs: Path, out: Path) -> None:
    found = _programs_in(programs)
    if not found:
        raise CompileError(
            f"{VENDOR} compiled {component}, but left no program in its folder",
            hint="--vendor ggml",
        )
    try:
        note = {
            name: {"size_bytes": size, "header": mxr_header(programs / name)}
            for name, size in found.items()
        }
    except ValueError as error:
        raise CompileError(f"{VENDOR} left a broken program of {component}: {error}") from error
    (out / NOTE_FILE).write_text(json.dumps(note, indent=1), encoding="utf-8")


def _check_programs(component: str, folder: Path) -> dict[str, int]:
    try:
        note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
        found = _programs_in(folder / PROGRAMS_FOLDER)
        if found != {name: one["size_bytes"] for name, one in note.items()}:
            raise ValueError(f"the programs are {found or 'none'}, noted are {sorted(note)}")
        for name, one in note.items():
            if mxr_header(folder / PROGRAMS_FOLDER / name) != one["header"]:
                raise ValueError(f"the head of {name} is another than noted")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(
            f"{VENDOR}: the engine of {component} in {folder} does not open: {error}"
        ) from error
    return found


def _rejection(device: Device, code: str, reason: str, hint: str = "") -> Rejection:
    return Rejection(vendor=VENDOR, code=code, reason=reason, hint=hint, device=device.id)
