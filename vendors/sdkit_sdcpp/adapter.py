"""stable-diffusion.cpp, through the binding cyllama: a checkpoint goes in, images come out.

It needs no export and no build, and takes quantised weights. It is slower than the engines that
are compiled here, and nothing compares what it draws with a reference; so it is used only when it
is named, or when a checkpoint is all there is.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdkit_dispatch.contract import Device, Plan, Precision, Rejection
from sdkit_dispatch.errors import ConfigError, PipelineError, RunError
from sdkit_dispatch.graph.vendor_options import options_from_mapping
from sdkit_sdcpp import SPEC
from sdkit_sdcpp.gpus import BrokenRuntimeError, index_of, visible_gpus
from sdkit_sdcpp.library import Library
from sdkit_sdcpp.names import PRECISION_FROM_WEIGHTS, WEIGHTS
from sdkit_sdcpp.session import SdcppSession

AS_FILED = "file"
_INSTALL = "sdkit-dispatch vendors install sdcpp"


@dataclass(frozen=True, kw_only=True)
class SdcppOptions:
    """The options of the sdcpp vendor.

    Attributes:
        weights: "file": as the checkpoint has them; else converted while they are read: fp32, fp16,
            bf16, q8_0, q5_0 or q4_0. A precision that is asked for wins.
        flash_attention: Attention without a matrix of all pairs: faster and smaller.
        direct_convolution: Convolutions without an unfolded copy of the picture: smaller, and on a
            processor no slower.
    """

    weights: str = AS_FILED
    flash_attention: bool = True
    direct_convolution: bool = True


class SdcppAdapter:
    """Serves processors, and GPUs that Vulkan sees.

    Attributes:
        threads: CPU threads; None: one for each core.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self._library = Library()
        self._gpus: tuple[str, ...] | None = None

    def probe(self, device: Device) -> str | Rejection:
        try:
            version = importlib.metadata.version(SPEC.runtime_packages[0])
            found = self._index(device)
        except (importlib.metadata.PackageNotFoundError, BrokenRuntimeError) as error:
            return _rejection(
                device, "runtime-broken", f"stable-diffusion.cpp does not start: {error}", _INSTALL
            )
        if isinstance(found, Rejection):
            return found
        return f"stable-diffusion.cpp of cyllama {version}"

    def plan(
        self, device: Device, precision: Precision | None, options: Mapping[str, Any]
    ) -> Plan | Rejection:
        chosen = _options(options)
        runtime = self.probe(device)
        if isinstance(runtime, Rejection):
            return runtime
        if precision is not None and precision not in WEIGHTS:
            return _rejection(
                device,
                "precision",
                f"it takes weights of {', '.join(WEIGHTS)}, asked for {precision}",
                "change --precision",
            )
        weights = precision or chosen.weights
        # Of weights as the file has them this is a guess; the session's facts say what they are.
        planned: Precision = next((one for one in WEIGHTS if one == weights), "fp16")
        return Plan(
            vendor="sdcpp",
            device=device,
            precision=planned,
            runtime=runtime,
            options={**asdict(chosen), "weights": weights},
            reasons=(
                "it takes a checkpoint as it is, with weights "
                + ("as the file has them" if weights == AS_FILED else f"converted to {weights}"),
            ),
        )

    def load(self, checkpoint: Path, device: Device, *, options: Mapping[str, Any]) -> SdcppSession:
        chosen = _options(options)
        try:
            index = self._index(device)
        except BrokenRuntimeError as error:
            raise RunError(f"stable-diffusion.cpp does not start: {error}", _INSTALL) from error
        if isinstance(index, Rejection):
            raise RunError(f"sdcpp: {index.reason}", index.hint)
        sd = self._library.bound_to(device, index)
        params = sd.SDContextParams(model_path=str(checkpoint))
        if self.threads is not None:
            params.n_threads = self.threads
        if chosen.weights != AS_FILED:
            params.wtype = sd.SDType[WEIGHTS[chosen.weights]]  # type: ignore[index]  # was checked
        params.flash_attn = params.diffusion_flash_attn = chosen.flash_attention
        params.diffusion_conv_direct = params.vae_conv_direct = chosen.direct_convolution
        params.free_params_immediately = False  # a second image is drawn with the same weights
        log = self._library.log
        log.clear()
        try:
            context = sd.SDContext(params)
        except (RuntimeError, ValueError, OSError) as error:
            raise PipelineError(
                f"stable-diffusion.cpp does not take '{checkpoint}': {log.last_words}",
                "give the checkpoint of a whole pipeline: UNet, text encoder and VAE in one file",
            ) from error
        self._library.require_bound(device)
        facts = {
            "device": device.name if index is None else self._visible()[index],
            "backend": log.backend,
            "precision": _precision(log.weights),
            "weights": ", ".join(f"{name}: {count}" for name, count in log.weights.items()),
            "runtime": str(self.probe(device)),
        }
        return SdcppSession(context, sd, log=log, facts=facts)

    def _visible(self) -> tuple[str, ...]:
        if self._gpus is None:
            self._gpus = visible_gpus()
        return self._gpus

    def _index(self, device: Device) -> int | None | Rejection:
        """Returns the number of a GPU, None for the processor, or why it cannot be had."""
        if device.kind == "cpu":
            try:
                self._visible()
            except BrokenRuntimeError:  # of a Vulkan driver, which the processor does not need
                self._gpus = visible_gpus(has_vulkan=False)
            return None
        gpus = self._visible()
        index = index_of(device, gpus)
        if index is None:
            seen = ", ".join(gpus) or "none"
            return _rejection(
                device,
                "no-such-gpu",
                f"Vulkan shows {seen}, and {device.name} is not clearly one of them",
                "install the Vulkan driver of the GPU, then: sdkit-dispatch doctor --vendor sdcpp",
            )
        return index


def _options(options: Mapping[str, Any]) -> SdcppOptions:
    chosen = options_from_mapping(SdcppOptions, "sdcpp", options)
    known = (AS_FILED, *WEIGHTS)
    if chosen.weights not in known:
        raise ConfigError(
            f"options.sdcpp.weights is '{chosen.weights}'; it may be {', '.join(known)}",
            "change the profile",
        )
    return chosen


def _precision(weights: Mapping[str, int]) -> str:
    """Returns the type that the large weights have; norms stay in float32 whatever they are."""
    most = sorted(weights, key=lambda name: (name == "f32", -weights[name]))
    return PRECISION_FROM_WEIGHTS.get(most[0], most[0]) if most else "unknown"


def _rejection(device: Device, code: str, reason: str, hint: str) -> Rejection:
    return Rejection(vendor="sdcpp", code=code, reason=reason, hint=hint, device=device.id)
