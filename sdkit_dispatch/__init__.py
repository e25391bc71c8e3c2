"""Compiles Stable Diffusion for the hardware at hand, checks it, and runs it without PyTorch.

    >>> from sdkit_dispatch import Choice, Dispatcher
    >>> with Dispatcher() as dispatcher:
    ...     devices = dispatcher.devices
    ...     decision = dispatcher.plan(Choice(gpu="cpu"))
    ...     built = dispatcher.build("sample", Choice(gpu="cpu"))
    ...     pipeline = dispatcher.load("sample", Choice(gpu="cpu"))
    ...     answer = pipeline.generate("a red seven", seed=1)
    >>> answer.images.shape
    (1, 32, 32, 3)

Importing this package imports no vendor runtime, and nothing heavy before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import Dispatcher
    from .choice import Choice
    from .lora import Lora

__all__ = ["Choice", "Dispatcher", "Lora", "__version__"]


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name == "Dispatcher":
        from .api import Dispatcher

        return Dispatcher
    if name == "Choice":
        from .choice import Choice

        return Choice
    if name == "Lora":
        from .lora import Lora

        return Lora
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
