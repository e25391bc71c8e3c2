"""Which LoRAs a user asks for, and what became of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.errors import ConfigError

SUFFIX = ".safetensors"
SHOWN_KEYS = 4


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA file, and how much of it is added; 0 is the same as leaving it out.

    Raises:
        ConfigError: The strength is no finite number.
    """

    path: Path
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise ConfigError(
                f"the strength of the LoRA '{self.path}' is {self.strength}",
                "give a number, such as 0.8",
            )


@dataclass(frozen=True, kw_only=True)
class AppliedLora:
    """A LoRA that is in the weights.

    Attributes:
        name: Stem of its file.
        layers: How many layers of it are in the weights; 0 at strength 0.
        unmatched: How many tensors of it have no place in this pipeline.
        examples: Some of those.
    """

    name: str
    strength: float
    sha256: str
    layers: int
    unmatched: int = 0
    examples: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        """What of it was left out, in a sentence; empty if nothing was."""
        if not self.unmatched:
            return ""
        names = ", ".join(self.examples)
        rest = self.unmatched - len(self.examples)
        more = f" and {rest} more" if rest else ""
        return (
            f"the LoRA '{self.name}' has {self.unmatched} tensors that belong to nothing in this "
            f"pipeline and were left out: {names}{more}"
        )


def lora_from_text(text: str) -> Lora:
    """Returns the LoRA that `FILE[:STRENGTH]` asks for: "style.safetensors:0.8".

    Raises:
        ConfigError: There is no file in it, or the strength is no number.
    """
    path, colon, strength = text.rpartition(":")
    # One letter before the colon is a drive of Windows.
    if not colon or len(path) < 2 or (not _is_number(strength) and not _ends_file(path)):
        path, strength = text, "1"
    if not path.strip():
        raise ConfigError("--lora is empty", "--lora style.safetensors:0.8")
    if not _is_number(strength):
        raise ConfigError(
            f"--lora is '{text}'; the strength after the colon is '{strength}', not a number",
            f"--lora {path}:0.8",
        )
    return Lora(path=Path(path).expanduser(), strength=float(strength))


def _ends_file(path: str) -> bool:
    return path.lower().endswith(SUFFIX)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
