"""Weights that stay in the computer's memory where the card's is short."""

from __future__ import annotations

from typing import Any

from sdkit_tensorrt.device_memory import CardMemory


def stream_weights(engine: Any, memory: CardMemory) -> dict[str, str]:  # Any: an ICudaEngine
    """Sets how much of an engine's weights the card holds; returns that as a fact.

    Only an engine that was built for it has weights that can stay away. Must come before its
    execution context is made.
    """
    streamable = int(engine.streamable_weights_size)
    if not streamable:
        return {}
    is_enough = streamable + int(engine.device_memory_size_v2) <= memory.free_bytes()
    automatic = int(engine.get_weight_streaming_automatic_budget())
    engine.weight_streaming_budget_v2 = streamable if is_enough else automatic
    return {"weights_on_card_bytes": str(streamable if is_enough else automatic)}
