"""A LoRA file: which layers it has, and the numbers of one at a time.

Three dialects write the same matrices under other names: kohya's scripts (`.lora_down.weight`,
`.alpha`), PEFT (`.lora_A.weight`) and diffusers (`.lora.down.weight`, and two older ones).
Source: https://github.com/kohya-ss/sd-scripts (networks/lora.py),
https://github.com/huggingface/diffusers (loaders/lora_conversion_utils.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sdkit_dispatch.checkpoint import TensorEntry, identity, read_checkpoint
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.pipeline_files import file_digest

from .wish import SHOWN_KEYS, Lora

Role = Literal["down", "up", "mid", "alpha"]
ROLES: tuple[tuple[str, Role], ...] = (
    (".lora_down.weight", "down"),
    (".lora_up.weight", "up"),
    (".lora_mid.weight", "mid"),
    (".lora_A.weight", "down"),
    (".lora_B.weight", "up"),
    (".lora_A.default.weight", "down"),
    (".lora_B.default.weight", "up"),
    (".lora.down.weight", "down"),
    (".lora.up.weight", "up"),
    (".lora_linear_layer.down.weight", "down"),
    (".lora_linear_layer.up.weight", "up"),
    ("_lora.down.weight", "down"),
    ("_lora.up.weight", "up"),
    (".alpha", "alpha"),
)
"""How a key ends -> what the tensor is."""
OTHER_KINDS: tuple[tuple[str, str], ...] = (
    (r"\.dora_scale$|\.lora_magnitude_vector", "DoRA"),
    (r"\.hada_", "LoHa"),
    (r"\.lokr_", "LoKr"),
    (r"\.oft_|\.boft_", "OFT"),
    (r"\.on_input$", "IA3"),
    (r"\.[ab][12]\.weight$", "GLoRA"),
    (r"\.(diff|diff_b|set_weight|w_norm|b_norm)$", "a full difference"),
    (r"\.lora_(A|B|up|down)(\.default)?\.bias$", "a LoRA with biases"),
    (r"\.lora_embedding_[AB]", "a LoRA of an embedding"),
)
"""Pattern of a key -> the kind of file that has it, which is not merged."""
DTYPES: Mapping[str, str] = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<u2"}
ADAPTER_NOTE = "lora_adapter_metadata"
"""Where diffusers since 0.34 writes rank and alpha, which then are no tensors."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one module of a model is changed by.

    Attributes:
        module: As the file names it, with its prefix.
        alpha: Over `rank` it is the factor of the product; the rank if the file does not say it.
    """

    module: str
    down: TensorEntry
    up: TensorEntry
    mid: TensorEntry | None
    alpha: float

    @property
    def rank(self) -> int:
        """The number of rows of `down`."""
        return self.down.shape[0]

    @property
    def tensors(self) -> int:
        """How many tensors of the file it stands for, the scalar not counted."""
        return 2 if self.mid is None else 3


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA whose header was read and is sound.

    Attributes:
        seen: What changes with the file.
        layers: Module, as the file names it -> its layer.
        strange: Keys that are of no layer.
    """

    lora: Lora
    sha256: str
    seen: str
    data_start: int
    layers: Mapping[str, Layer]
    strange: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file."""
        return self.lora.path

    def array(self, entry: TensorEntry) -> Any:  # Any: numpy.ndarray
        """Returns the numbers of a tensor as float32.

        Raises:
            PipelineError: They cannot be read, or are not all finite.
        """
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.data_start + entry.start)
                data = stream.read(entry.size_bytes)
        except OSError as error:
            raise PipelineError(f"'{self.path}' cannot be read: {error.strerror}") from error
        if len(data) != entry.size_bytes:
            raise _changed(self.path)
        values = np.frombuffer(data, DTYPES[entry.dtype])
        if entry.dtype == "bf16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False).reshape(entry.shape)
        if not np.isfinite(values).all():
            raise PipelineError(
                f"the LoRA '{self.path}' has numbers in '{entry.name}' that are not finite",
                "its training failed, or the file is damaged: take another one",
            )
        return values

    def require_unchanged(self) -> None:
        """Refuses a file that was replaced while it was read.

        Raises:
            PipelineError: It was.
        """
        if identity(self.path) != self.seen:
            raise _changed(self.path)


def read_lora(lora: Lora, *, memo: Path | None = None) -> LoraFile:
    """Reads and checks the header of a LoRA file.

    Args:
        lora: What was asked for.
        memo: Where digests of files are remembered.

    Raises:
        PipelineError: It is damaged, or of a kind that is not merged; says which keys.
    """
    path = lora.path
    try:
        checkpoint = read_checkpoint(path)
    except PipelineError as error:
        raise PipelineError(
            error.message.replace("the checkpoint", "the LoRA"),
            "give the .safetensors file of a LoRA",
        ) from error
    if checkpoint.format != "safetensors":
        raise PipelineError(
            f"the LoRA '{path}' is a .{checkpoint.format} file", "give it as .safetensors"
        )
    seen = identity(path)
    names = [one.name for one in checkpoint.tensors]
    _refuse_other_kinds(path, names)
    groups: dict[str, dict[Role, TensorEntry]] = {}
    strange: list[str] = []
    for entry in checkpoint.tensors:
        found = next(((end, role) for end, role in ROLES if entry.name.endswith(end)), None)
        if found is None:
            strange.append(entry.name)
            continue
        _require_floats(path, entry)
        module = entry.name.removesuffix(found[0])
        if groups.setdefault(module, {}).setdefault(found[1], entry) is not entry:
            raise PipelineError(f"the LoRA '{path}' has {found[1]} of '{module}' twice")
    data_start, notes = _notes(path)
    result = LoraFile(
        lora=lora,
        sha256=file_digest(path, memo=memo),
        seen=seen,
        data_start=data_start,
        layers={},
        strange=(),
    )
    layers = {}
    for module, parts in groups.items():
        if set(parts) == {"alpha"}:
            strange.append(parts["alpha"].name)
        else:
            layers[module] = _layer(result, module, parts, notes)
    if not layers:
        raise PipelineError(
            f"'{path}' is no LoRA: none of its {len(names)} tensors is named as one of a LoRA; "
            f"it has {', '.join(names[:SHOWN_KEYS])}",
            "a whole checkpoint goes to --pipeline; --lora takes the file of a LoRA",
        )
    return replace(result, layers=layers, strange=tuple(strange))


def _layer(
    file: LoraFile, module: str, parts: Mapping[Role, TensorEntry], notes: Mapping[str, Any]
) -> Layer:  # Any: JSON data
    for role, other in (("down", "up"), ("up", "down")):
        if role not in parts:
            there = parts.get("up", parts.get("down", parts.get("mid")))
            name = there.name if there is not None else module
            raise PipelineError(
                f"the LoRA '{file.path}' has '{name}' and no '{role}' to go with it"
                if other in parts
                else f"the LoRA '{file.path}' has '{name}' without its other tensors",
                "download the file again",
            )
    down, up, mid = parts["down"], parts["up"], parts.get("mid")
    ranks = [down.shape[:1], up.shape[1:2], *([mid.shape[:1], mid.shape[1:2]] if mid else [])]
    is_matrix = len(down.shape) in (2, 4) and len(up.shape) in (2, 4)
    is_pointwise = all(size == 1 for size in up.shape[2:])
    if mid is not None:
        is_pointwise = is_pointwise and all(size == 1 for size in down.shape[2:])
        is_matrix = is_matrix and len(mid.shape) == 4
    if not is_matrix or not is_pointwise or len(set(ranks)) != 1:
        shapes = ", ".join(
            f"{role} {list(entry.shape)}" for role, entry in parts.items() if role != "alpha"
        )
        raise PipelineError(
            f"the LoRA '{file.path}' has shapes for '{module}' that make no product: {shapes}",
            "download the file again",
        )
    alpha = float(down.shape[0])
    if "alpha" in parts:
        values = file.array(parts["alpha"])
        if values.size != 1:
            raise PipelineError(
                f"the LoRA '{file.path}' has {values.size} numbers in '{parts['alpha'].name}', "
                "which is one"
            )
        alpha = float(values.reshape(()))
    else:
        alpha = _noted_alpha(file.path, module, notes, alpha)
    return Layer(module=module, down=down, up=up, mid=mid, alpha=alpha)


def _noted_alpha(path: Path, module: str, notes: Mapping[str, Any], rank: float) -> float:
    """Returns the alpha that diffusers wrote into the header, or the rank."""
    prefix = module.partition(".")[0]
    if notes.get(f"{prefix}.use_dora") or notes.get(f"{prefix}.use_rslora"):
        kind = "DoRA" if notes.get(f"{prefix}.use_dora") else "a rank-stabilised LoRA"
        raise PipelineError(f"the LoRA '{path}' is {kind}, as its header says: not merged")
    alpha = notes.get(f"{prefix}.lora_alpha", rank)
    patterns = notes.get(f"{prefix}.alpha_pattern")
    for end, value in patterns.items() if isinstance(patterns, dict) else ():
        if module == end or module.endswith(f".{end}"):
            alpha = value
    if type(alpha) not in (int, float) or not abs(alpha) < 1e6:
        raise PipelineError(f"the LoRA '{path}' has the alpha {str(alpha)[:40]!r} in its header")
    return float(alpha)


def _notes(path: Path) -> tuple[int, Mapping[str, Any]]:  # Any: JSON data
    """Returns where the tensor data begins, and what diffusers noted of the adapter."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = json.loads(stream.read(length)).get("__metadata__", {}).get(ADAPTER_NOTE, "{}")
    except (OSError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise _changed(path) from error  # it was sound a moment ago
    try:
        notes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"the LoRA '{path}' has {ADAPTER_NOTE} that is not JSON") from error
    return 8 + length, notes if isinstance(notes, dict) else {}


def _refuse_other_kinds(path: Path, names: list[str]) -> None:
    for pattern, kind in OTHER_KINDS:
        found = [name for name in names if re.search(pattern, name)]
        if found:
            more = f" and {len(found) - 2} more" if len(found) > 2 else ""
            raise PipelineError(
                f"the LoRA '{path}' is {kind}: it has '{', '.join(found[:2])}'{more}; only LoRA "
                "and LoCon are merged",
                "take a LoRA, or merge it into the model before the export",
            )


def _require_floats(path: Path, entry: TensorEntry) -> None:
    if entry.dtype not in DTYPES:
        raise PipelineError(
            f"the LoRA '{path}' has '{entry.name}' in {entry.dtype}; known are {', '.join(DTYPES)}",
            "convert it to fp16",
        )


def _changed(path: Path) -> PipelineError:
    return PipelineError(f"the LoRA '{path}' was changed while it was read", "run it again")
