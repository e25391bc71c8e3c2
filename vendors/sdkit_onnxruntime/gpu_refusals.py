"""What the errors of GPU providers mean, as tables: their words -> a code, a reason, a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A row: a pattern that is found anywhere in the words; `reason` takes its groups."""

    pattern: str
    code: str
    reason: str
    hint: str


ROCM_HINT = (
    "install ROCm 7 or newer with MIGraphX from AMD's package repository; or take --vendor ggml, "
    "which needs neither"
)
MIGRAPHX: tuple[Meaning, ...] = (
    Meaning(
        pattern=r"(libmigraphx\w*\.so\.\d+): cannot open shared object file",
        code="no-migraphx",
        reason="MIGraphX is not installed: there is no {0}",
        hint=ROCM_HINT,
    ),
    Meaning(
        pattern=r"(libamdhip64\.so\.\d+|libhiprtc\.so\.\d+): cannot open shared object file",
        code="no-hip",
        reason="ROCm's HIP is not installed, or is an older one (Debian's is HIP 6): there is no "
        "{0}",
        hint=ROCM_HINT,
    ),
    Meaning(
        pattern=r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file",
        code="no-rocm-library",
        reason="a library of ROCm is missing: {0}",
        hint=ROCM_HINT,
    ),
    Meaning(
        pattern=r"HIP failure 100|no ROCm-capable device|get_device_id: No device",
        code="no-card",
        reason="ROCm finds no card that it serves",
        hint="check `rocminfo`, that the user is in the groups render and video, and "
        "ROCR_VISIBLE_DEVICES",
    ),
    Meaning(
        pattern=r"Unknown provider option: \"?([\w-]+)",
        code="option",
        reason='this version of the provider has no option "{0}"',
        hint="sdkit-dispatch vendors install migraphx",
    ),
    Meaning(
        pattern=r"Conflicting session configuration",
        code="option",
        reason="the provider may not be asked for no processor at all and for a fallback at once",
        hint="",
    ),
    Meaning(
        pattern=r"[Uu]nknown operator: (\w+)",
        code="operator",
        reason="MIGraphX does not know the operator {0}",
        hint="export the pipeline with opset 18 to 20, or take --vendor ggml",
    ),
    Meaning(
        pattern=r"No solutions provided for ([\w:]+)",
        code="no-kernel",
        reason="MIGraphX has no kernel for {0} on this card",
        hint="--vendor ggml",
    ),
)
CUDA: tuple[Meaning, ...] = (
    Meaning(
        pattern=r"(libcuda\.so\.1|nvcuda\.dll)",
        code="no-driver",
        reason="the NVIDIA driver is not here: there is no {0}",
        hint="install NVIDIA driver 580 or newer",
    ),
    Meaning(
        pattern=r"(lib(?:cublas|cudart|cudnn|cufft|curand|nvrtc)\w*\.so[.\d]*)"
        r"|(\w*(?:cublas|cudart|cudnn|cufft)\w*\.dll)",
        code="no-cuda-libraries",
        reason="a library of CUDA 13 or cuDNN 9 is missing: {0}",
        hint="sdkit-dispatch vendors install cuda",
    ),
    Meaning(
        pattern=r"CUDA failure 35|driver version is insufficient",
        code="driver-too-old",
        reason="the NVIDIA driver is older than CUDA 13 needs",
        hint="update the NVIDIA driver to 580 or newer",
    ),
    Meaning(
        pattern=r"CUDA failure 100|no CUDA-capable device",
        code="no-card",
        reason="CUDA finds no card",
        hint="check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
    ),
    Meaning(
        pattern=r"CUDA failure 2\b|out of memory|Failed to allocate memory",
        code="memory",
        reason="the card has not enough free memory",
        hint="close other programs, or ask for a smaller image",
    ),
    Meaning(
        pattern=r"assigned to the default CPU EP|gave CPUExecutionProvider",
        code="on-cpu",
        reason="ONNX Runtime would run it on the processor",
        hint="sdkit-dispatch vendors install cuda",
    ),
)


def meaning_of(words: str, table: Sequence[Meaning]) -> Meaning | None:
    """Returns the row that fits, its reason completed; None if nobody knows these words."""
    for row in table:
        found = re.search(row.pattern, words)
        if found:
            groups = [group for group in found.groups() if group]
            return Meaning(
                pattern=row.pattern,
                code=row.code,
                reason=row.reason.format(*groups),
                hint=row.hint,
            )
    return None
