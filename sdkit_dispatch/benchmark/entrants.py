"""What takes part in a benchmark: a vendor as we run it, and a vendor's bare runtime.

A peer is the third kind (`peers.py`). All of them are prepared once, and opened and closed as often
as the measurement wants; what they do meanwhile, they do in a process of their own.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sdkit_dispatch.benchmark.machine import drop_from_memory, peak_rss_bytes
from sdkit_dispatch.benchmark.quick import seeded_feeds
from sdkit_dispatch.benchmark.records import Kind, Row
from sdkit_dispatch.component_build import ComponentBuild
from sdkit_dispatch.contract import Arrays, Plan, no_report, record_to_json
from sdkit_dispatch.wanted import Wanted
from sdkit_dispatch.worker_client import RemoteSession, Timing, WorkerClient

if TYPE_CHECKING:
    from sdkit_dispatch.api import Dispatcher
    from sdkit_dispatch.choice import Choice

Use = Literal["components", "images"]


@dataclass(frozen=True, kw_only=True)
class Image:
    """One call of text to image: how long it took, and the pixels (uint8 `[N, H, W, 3]`)."""

    wall_s: float
    cpu_s: float | None
    pixels: Any  # Any: numpy.ndarray, or None if the entrant shows none


class Entrant(Protocol):
    """One row of the report. `row` holds what is known of it so far."""

    row: Row
    components: tuple[str, ...]
    """Those that it can run by themselves; known once it is prepared."""
    makes_images: bool

    def prepare(self) -> None:
        """Builds or converts what it needs; fills the row with what that took."""

    def forget_files(self) -> bool:
        """Drops its files from memory; False where that cannot be done."""

    def open(self, use: Use) -> None:
        """Starts its process and loads everything that `use` needs."""

    def run(self, component: str, runs: int) -> Timing:
        """Runs a component; the inputs are the same every time."""

    def image(self) -> Image:
        """Makes one image, or one batch of them."""

    def pid(self) -> int | None:
        """Of its process; None while it has none."""

    def close(self) -> None:
        """Ends its process; the row then has its peak memory. Twice is fine."""


@dataclass(kw_only=True)
class VendorEntrant:
    """A vendor as the denoising loop runs it: engines of the store, in a worker.

    Attributes:
        label: Name of its row; the vendor's by default.
    """

    dispatcher: Dispatcher
    choice: Choice
    plan: Plan
    want: Wanted
    label: str = ""
    makes_images: bool = True
    components: tuple[str, ...] = ()
    row: Row = field(init=False)
    _built: tuple[ComponentBuild, ...] = ()
    _client: WorkerClient | None = None
    _sessions: dict[str, RemoteSession] = field(default_factory=dict)
    _feeds: dict[str, Arrays] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.row = _row_of(self.plan, kind="vendor", name=self.label or self.plan.vendor)

    def prepare(self) -> None:
        self.plan, self._built = self.dispatcher.builder(self.choice).build_with(
            self.want, self.plan, self.dispatcher.report
        )
        self.components = tuple(part.component for part in self._built)
        self._feeds = feeds_of(self.want)
        manifests = [part.manifest for part in self._built]
        self.row = replace(
            self.row,
            runtime=self.plan.runtime,
            precision=", ".join(dict.fromkeys(one.request.precision for one in manifests)),
            built_now=not any(part.is_hit for part in self._built),
            build_s=sum(one.build_s for one in manifests),
            engine_bytes=sum(one.size_bytes for one in manifests),
            error={
                part.component: max(
                    entry["relative_max"] for entry in part.manifest.verdict.metrics.values()
                )
                for part in self._built
                if part.manifest.verdict.metrics
            },
        )

    def forget_files(self) -> bool:
        folders = [Path(part.engine.folder) for part in self._built]
        folders += [Path(part.engine.onnx).parent for part in self._built]
        return all([drop_from_memory(folder) for folder in folders])

    def open(self, use: Use) -> None:
        self._client = self.dispatcher.workers.fresh(self.dispatcher.specs[self.plan.vendor])
        if use == "components":
            for part in self._built:
                session = self._client.load(part.engine, self.plan.device)
                self._sessions[part.component] = session
            self.row = replace(
                self.row, ran={name: dict(one.facts) for name, one in self._sessions.items()}
            )

    def run(self, component: str, runs: int) -> Timing:
        return self._sessions[component].time(component, self._feeds[component], runs=runs)

    def image(self) -> Image:
        assert self._client is not None
        params = {
            "pipeline": str(self.want.pipeline.folder),
            "memo": str(self.dispatcher.store.memo),
            "engines": [record_to_json(part.engine) for part in self._built],
            "device": record_to_json(self.plan.device),
            "request": record_to_json(self.want.request),
            "keep_loaded": True,
            # The others encode the prompt for every image; then so do we.
            "keep_prompts": 0,
        }
        started_s = time.perf_counter()
        answer = self._client.generate(params, {}, no_report)
        wall_s = time.perf_counter() - started_s
        if not self.row.ran:
            self.row = replace(self.row, ran=answer.result["facts"])
        return Image(wall_s=wall_s, cpu_s=None, pixels=answer.arrays["images"])

    def pid(self) -> int | None:
        return self._client.pid if self._client is not None else None

    def close(self) -> None:
        self._sessions.clear()
        self.row, self._client = _closed(self.row, self._client), None


@dataclass(kw_only=True)
class BareEntrant:
    """A vendor's runtime used directly, by the `bare` module of its package.

    Attributes:
        label: Name of the row that it is held against; the vendor's by default.
    """

    dispatcher: Dispatcher
    plan: Plan
    want: Wanted
    label: str = ""
    components: tuple[str, ...] = ()
    makes_images: bool = False
    row: Row = field(init=False)
    _client: WorkerClient | None = None
    _feeds: dict[str, Arrays] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = f"{self.label or self.plan.vendor} (bare)"
        self.row = _row_of(self.plan, kind="bare", name=name)

    def prepare(self) -> None:
        self.components = tuple(self.want.shapes)
        self._feeds = feeds_of(self.want)
        self.row = replace(
            self.row,
            runtime=self.plan.runtime,
            note="the runtime used directly, as its documentation shows: what ours is held against",
        )

    def forget_files(self) -> bool:
        return False

    def open(self, use: Use) -> None:
        self._client = self.dispatcher.workers.fresh(self.dispatcher.specs[self.plan.vendor])
        for component in self.components:
            self.run(component, 1)

    def run(self, component: str, runs: int) -> Timing:
        assert self._client is not None
        return self._client.time_bare(
            self.want.pipeline.components[component].onnx,
            self.want.shapes[component],
            self.plan.device,
            self._feeds[component],
            runs=runs,
        )

    def image(self) -> Image:
        raise NotImplementedError("a bare runtime has no denoising loop")

    def pid(self) -> int | None:
        return self._client.pid if self._client is not None else None

    def close(self) -> None:
        self.row, self._client = _closed(self.row, self._client), None


def has_bare(dispatcher: Dispatcher, vendor: str) -> bool:
    """Returns whether a vendor's package shows how its runtime is used directly."""
    package = dispatcher.specs[vendor].adapter.partition(":")[0].rpartition(".")[0]
    return bool(package) and importlib.util.find_spec(f"{package}.bare") is not None


def feeds_of(want: Wanted) -> dict[str, Arrays]:
    """Returns the inputs that every entrant is timed with, of every component."""
    return {
        name: seeded_feeds(want.pipeline.components[name], shapes)
        for name, shapes in want.shapes.items()
    }


def close_all(entrants: Sequence[Entrant]) -> None:
    """Ends the processes of all of them."""
    with ExitStack() as stack:
        for entrant in entrants:
            stack.callback(entrant.close)


def _row_of(plan: Plan, *, kind: Kind, name: str) -> Row:
    return Row(
        name=name,
        kind=kind,
        vendor=plan.vendor,
        device=plan.device.id,
        runtime=plan.runtime,
        precision=plan.precision,
    )


def _closed(row: Row, client: WorkerClient | None) -> Row:
    """Ends a worker; returns the row with the most memory that one of its workers has had."""
    if client is None:
        return row
    peak = peak_rss_bytes(client.pid)
    client.close()
    return with_peak(row, peak)


def with_peak(row: Row, peak: int | None) -> Row:
    """Returns the row with that peak memory, unless it has had more."""
    return row if peak is None else replace(row, peak_rss_bytes=max(peak, row.peak_rss_bytes or 0))


def relative_errors(
    outputs: Mapping[str, Any], expected: Mapping[str, Any]
) -> float:  # Any: numpy.ndarray
    """Returns the largest difference of any output over the largest value of the reference's."""
    from sdkit_dispatch.check import measure

    return max(
        (measure(outputs[name], expected[name])["relative_max"] for name in expected), default=0.0
    )
