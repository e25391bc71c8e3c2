"""The library in this process: bound to one device, and what its log says."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from sdkit_dispatch.contract import Device
from sdkit_dispatch.errors import RunError

log = logging.getLogger(__name__)

VISIBLE = "GGML_VK_VISIBLE_DEVICES"
_CHOSEN = "SD_VK_DEVICE"
_INITIALISED = re.compile(r"Initializing backend: (\S+)")
_WEIGHTS = re.compile(r"Diffusion model weight type stat:\s*(.+)")
_LEVELS = {0: logging.DEBUG, 1: logging.INFO, 2: logging.WARNING, 3: logging.ERROR}


class LibraryLog:
    """What the library said since the last `clear`.

    Attributes:
        backend: "CPU", "Vulkan0": what it really computes on; empty until a checkpoint is loaded.
        weights: Type of the UNet's weights -> number of tensors.
        errors: Its errors and warnings, oldest first.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.backend = ""
        self.weights: dict[str, int] = {}
        self.errors: list[str] = []

    def __call__(self, level: int, text: str) -> None:
        """Takes one message of the library."""
        line = text.strip()
        log.log(_LEVELS.get(int(level), logging.INFO), "%s", line)
        if found := _INITIALISED.search(line):
            self.backend = self.backend or found[1]
        elif "Using CPU backend" in line:
            self.backend = "CPU"
        elif found := _WEIGHTS.search(line):
            pairs = (part.split(":") for part in found[1].split("|") if ":" in part)
            self.weights = {name.strip(): int(count) for name, count in pairs}
        if int(level) >= 2:
            self.errors.append(re.sub(r"^\S+\s+-\s+", "", line))

    @property
    def last_words(self) -> str:
        """The last errors, for a message."""
        return "; ".join(self.errors[-3:]) or "it gave no reason"


class Library:
    """stable-diffusion.cpp through its binding; one in a process."""

    def __init__(self) -> None:
        self.log = LibraryLog()
        self._sd: Any = None  # the binding's module, which has no types
        self._bound = ""

    def bound_to(self, device: Device, index: int | None) -> Any:
        """Returns the binding, which computes on this device and no other.

        Args:
            device: Where to run.
            index: Number of a GPU among those that the library sees; None for the processor.

        Raises:
            RunError: This process already computes elsewhere.
        """
        wanted = "CPU" if index is None else f"Vulkan{index}"
        if self._bound and self._bound != wanted:
            raise RunError(
                f"sdcpp: this worker computes on {self._bound} and cannot change to {device.name}",
                "run the command again",
            )
        if not self._bound:
            # Read once, while the backends are loaded, and there is no parameter for either.
            if index is None:
                os.environ[VISIBLE] = ""
            else:
                os.environ[_CHOSEN] = str(index)
            import cyllama.sd.stable_diffusion as sd

            sd.set_log_callback(self.log)
            sd.ggml_backend_load_all()
            self._sd, self._bound = sd, wanted
        return self._sd

    def require_bound(self, device: Device) -> None:
        """Refuses a context that the library opened elsewhere than it was told to.

        Raises:
            RunError: Names both places.
        """
        if self.log.backend != self._bound:
            raise RunError(
                f"sdcpp: the library computes on {self.log.backend or 'an unknown device'}, and "
                f"{device.name} ({self._bound}) was asked for",
                "sdkit-dispatch doctor --vendor sdcpp",
            )
