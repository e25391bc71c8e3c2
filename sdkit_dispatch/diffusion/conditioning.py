"""Prompts -> what the UNet is conditioned on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.diffusion.feeds import Floats, first_output
from sdkit_dispatch.diffusion.tokenizer import ClipTokenizer
from sdkit_dispatch.errors import PipelineError

RunText = Callable[[str, Mapping[str, NDArray[np.int64]]], dict[str, Floats]]
"""(component, feeds of one row) -> outputs."""

_ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}
"""Tokenizer -> its encoder, in the order in which SDXL joins their states."""
_HIDDEN_STATE = re.compile(r"hidden_states\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """One prompt, encoded.

    Attributes:
        hidden: `[tokens, features]`; of SDXL both encoders side by side.
        pooled: `[features]`; None for families without it.
    """

    hidden: Floats
    pooled: Floats | None = None

    def zeros(self) -> Conditioning:
        """Returns what stands for no prompt at all in models trained with it (SDXL)."""
        pooled = None if self.pooled is None else np.zeros_like(self.pooled)
        return Conditioning(hidden=np.zeros_like(self.hidden), pooled=pooled)


def encode_prompt(
    text: str,
    tokenizers: Mapping[str, ClipTokenizer],
    run: RunText,
    *,
    chunks: int,
    family: str,
) -> Conditioning:
    """Encodes `text`, chunk by chunk.

    Args:
        text: A prompt.
        tokenizers: Of the pipeline, by folder name.
        run: Runs a text encoder on one row.
        chunks: Into how many chunks the text is padded.
        family: "sd" or "sdxl".
    """
    hidden, pooled = [], None
    for name, component in _ENCODERS.items():
        if (tokenizer := tokenizers.get(name)) is None:
            continue
        rows = [
            run(component, {"input_ids": row[np.newaxis]}) for row in tokenizer.chunks(text, chunks)
        ]
        pick = _penultimate if family == "sdxl" else _last
        hidden.append(np.concatenate([pick(component, outputs)[0] for outputs in rows]))
        if component == "text_encoder_2":
            # Of the first chunk, as Stable Diffusion WebUI has it: the model knows one only.
            pooled = first_output(component, rows[0], ("text_embeds",), rank=2)[0]
    return Conditioning(hidden=np.concatenate(hidden, axis=-1), pooled=pooled)


def guidance_embedding(guidance: float, channels: int) -> Floats:
    """Returns `[channels]`: the guidance scale as an LCM UNet takes it.

    Source: "On Distillation of Guided Diffusion Models", arXiv 2210.03142; diffusers feeds
    1000 * (scale - 1) to a sinusoidal embedding.
    """
    half = channels // 2
    rates = np.exp(np.arange(half) * (-math.log(10_000.0) / (half - 1)))
    angles = 1000.0 * (guidance - 1) * rates
    embedding = np.concatenate([np.sin(angles), np.cos(angles), np.zeros(channels % 2)])
    return embedding.astype(np.float32)


def _last(component: str, outputs: Mapping[str, Floats]) -> Floats:
    return first_output(component, outputs, ("last_hidden_state",), rank=3)


def _penultimate(component: str, outputs: Mapping[str, Floats]) -> Floats:
    """SDXL conditions on the states before the last layer."""
    states = {
        int(found[1]): value
        for name, value in outputs.items()
        if (found := _HIDDEN_STATE.fullmatch(name))
    }
    if len(states) < 2:
        raise PipelineError(
            f"{component}: SDXL needs outputs hidden_states.0, hidden_states.1, ...; "
            f"it has {', '.join(outputs)}",
            "export the text encoders with output_hidden_states",
        )
    return states[sorted(states)[-2]]
