"""Before a build: what it will take, from the size of the weights and from past builds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .cache import EngineStore
from .contract import BuildRequest, VendorSpec
from .env.room import free_bytes
from .siblings import checked_siblings

MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a build will take.

    Attributes:
        components: That are not stored and must be built.
        estimate_s: Seconds of past builds together; None if one of them was never built here.
        disk_bytes: What the engines will take at most, roughly.
        free_disk_bytes: Of the disk of the store.
        memory_bytes: What compiling the largest component takes, roughly.
        free_memory_bytes: None if unknown.
    """

    vendor: str
    components: tuple[str, ...]
    estimate_s: float | None
    disk_bytes: int
    free_disk_bytes: int
    memory_bytes: int
    free_memory_bytes: int | None

    @property
    def is_short_of_disk(self) -> bool:
        """True if the disk would be full before the last engine is there."""
        return self.disk_bytes > self.free_disk_bytes

    @property
    def is_short_of_memory(self) -> bool:
        """True if compiling the largest component will probably swap, or be killed."""
        return self.free_memory_bytes is not None and self.memory_bytes > self.free_memory_bytes

    def __str__(self) -> str:
        time = "time unknown" if self.estimate_s is None else f"about {_duration(self.estimate_s)}"
        free = self.free_memory_bytes
        return (
            f"{self.vendor}: to build {', '.join(self.components)}: {time}, "
            f"{_size(self.disk_bytes)} of disk ({_size(self.free_disk_bytes)} free), "
            f"{_size(self.memory_bytes)} of memory"
            + ("" if free is None else f" ({_size(free)} free)")
        )


def forecast(
    store: EngineStore,
    spec: VendorSpec,
    requests: Iterable[BuildRequest],
    weights_bytes: Mapping[str, int],
    *,
    machine_memory_bytes: int | None = None,
) -> Forecast | None:
    """Returns what building the engines that are not stored takes; None if all are stored.

    Args:
        store: Where they are looked for, and where past builds are.
        spec: The vendor, with its factors.
        requests: Of all components.
        weights_bytes: Component -> size of its graph and weights.
        machine_memory_bytes: Of the whole machine, for where free memory cannot be asked.
    """
    missing = [request for request in requests if not _is_stored(store, request)]
    if not missing:
        return None
    sizes = [weights_bytes[request.component] for request in missing]
    written = [_own_bytes(store, spec, one, weights_bytes[one.component]) for one in missing]
    free_memory_bytes = available_memory_bytes()
    return Forecast(
        vendor=spec.name,
        components=tuple(request.component for request in missing),
        estimate_s=_estimate_s(store, missing),
        disk_bytes=round(sum(written) * spec.disk_factor),
        free_disk_bytes=free_bytes(store.home),
        memory_bytes=round(max(sizes) * spec.memory_factor),
        free_memory_bytes=machine_memory_bytes if free_memory_bytes is None else free_memory_bytes,
    )


def available_memory_bytes() -> int | None:
    """Returns the memory that a new process can have without swapping; None if unknown."""
    try:
        lines = MEMORY_INFO.read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _own_bytes(
    store: EngineStore, spec: VendorSpec, request: BuildRequest, weights_bytes: int
) -> int:
    """Returns what an engine takes, beside the files that a sibling lends it."""
    for entry in checked_siblings(store, request) if spec.shared_files else ():
        manifest = entry.manifest
        if manifest is not None and manifest.request.weights_digest == request.weights_digest:
            own = set(manifest.files) - set(spec.shared_files)
            return sum(manifest.files[name].size_bytes for name in own)
    return weights_bytes


def _is_stored(store: EngineStore, request: BuildRequest) -> bool:
    entry = store.read(request.key)
    return entry is not None and not entry.damage


def _estimate_s(store: EngineStore, missing: Sequence[BuildRequest]) -> float | None:
    """Returns the sum of the medians of past builds; of the same precision where there are any."""
    past: dict[tuple[str, str, str], list[float]] = {}
    for entry in store.entries():
        if entry.manifest is not None:
            request = entry.manifest.request
            for precision in (request.precision, "any"):
                times = past.setdefault((request.vendor, request.component, precision), [])
                times.append(entry.manifest.build_s)
    total_s = 0.0
    for request in missing:
        key = (request.vendor, request.component)
        known = past.get((*key, request.precision)) or past.get((*key, "any"))
        if not known:
            return None
        total_s += median(known)
    return total_s


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.1f} GB"
