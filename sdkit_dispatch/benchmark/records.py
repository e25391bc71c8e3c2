"""What a benchmark says: plain records that survive JSON, and nothing computed twice.

Every figure that a table or chart shows is a field here; the writers only format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sdkit_dispatch.benchmark.statistics import Drift, Ratio
from sdkit_dispatch.contract import Device

SCHEMA_VERSION = 1
Kind = Literal["vendor", "bare", "peer"]


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """One point of the grid: what is drawn.

    Attributes:
        suite: Name of the suite whose values these are; empty if the user chose them.
        images: False: the components only; images per minute are then computed from them.
    """

    width_px: int
    height_px: int
    batch: int
    steps: int
    guidance: float
    scheduler: str
    seed: int
    prompt: str
    suite: str = ""
    images: bool = True


@dataclass(frozen=True, kw_only=True)
class Series:
    """Timings of one thing, round by round.

    Attributes:
        rounds_ms: Median of every round's block, in the order of the rounds; wall time.
        median_ms: Of the rounds.
        p90_ms: Of all single runs.
        cpu_ms: Median CPU time of a run, of all threads together; None if unknown.
        runs: Single runs in all.
    """

    rounds_ms: tuple[float, ...]
    median_ms: float
    p90_ms: float
    runs: int
    drift: Drift
    cpu_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Versus:
    """How an entrant did against another, on one thing, in pairs of the same round.

    Attributes:
        ratio: Of wall times.
        cpu_ratio: Of CPU times, which other programs disturb less; None if one is unknown.
    """

    of: str
    other: str
    what: str
    ratio: Ratio
    cpu_ratio: Ratio | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entrant in one case.

    Attributes:
        name: "openvino", "openvino (bare)", "openvino-genai"; no other row of the case has it.
        vendor: Whose row it is; empty for a peer.
        runtime: And its version, as it says itself.
        ran: Component -> what the loaded engine says of itself: device, precision, threads.
        built_now: False: the engines were in the store, and `build_s` is what building took then.
        build_s: Compiling and checking all engines, or what a peer takes to convert the model.
        cold_load_s: A fresh process, its files not in memory (where the system lets us drop them).
        warm_load_s: A fresh process, its files in memory.
        first_image_s: From the start of a fresh process to the first image.
        components: Component -> timings.
        image: Timings of whole images; None if none was made.
        images_per_minute: Measured, or computed from the components.
        is_rate_measured: False: computed.
        error: Component -> largest difference from the reference over its largest value.
        image_error: Mean difference from the reference's image, in levels of 0..255.
        failure: Why there are no (or not all) figures; empty if there are.
        hint: What would change that.
        note: What a reader must know of this row.
    """

    name: str
    kind: Kind
    vendor: str = ""
    device: str = ""
    runtime: str = ""
    precision: str = ""
    ran: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    built_now: bool | None = None
    build_s: float | None = None
    engine_bytes: int | None = None
    cold_load_s: float | None = None
    warm_load_s: float | None = None
    first_image_s: float | None = None
    components: Mapping[str, Series] = field(default_factory=dict)
    image: Series | None = None
    images_per_minute: float | None = None
    is_rate_measured: bool = False
    peak_rss_bytes: int | None = None
    device_memory_bytes: int | None = None
    error: Mapping[str, float] = field(default_factory=dict)
    image_error: float | None = None
    failure: str = ""
    hint: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: every entrant, the ratios, and what the machine did meanwhile."""

    spec: CaseSpec
    rows: tuple[Row, ...]
    versus: tuple[Versus, ...] = ()
    drift: Drift | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """What may change while a benchmark runs; None where the system does not say.

    Attributes:
        load: Processes that want to run, averaged over a minute.
        others_cpu: Processors kept busy by everything but us since the reading before.
        throttles: Times that the processor was slowed down for heat, since the system started.
    """

    at_s: float
    load: float | None = None
    others_cpu: float | None = None
    frequency_mhz: float | None = None
    governor: str = ""
    throttles: int | None = None
    on_battery: bool | None = None
    free_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, as far as it bears on speed."""

    platform: str
    kernel: str
    python: str
    processors: int
    is_container: bool
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """What was drawn with.

    Attributes:
        name: Of its folder, without the path.
        graphs: Component -> sha256 of the graph, shortened; weights do not bear on speed.
        weights_bytes: Component -> size of its weights.
    """

    name: str
    family: str
    graphs: Mapping[str, str]
    weights_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole benchmark.

    Attributes:
        command: As it was given.
        threads: CPU threads of every session; None for each runtime's own choice.
        residency: "resident": all entrants stay loaded, and take turns; "reloaded": one at a time
            is loaded, in every round, because the memory does not hold them together.
        states: Of the machine, first and last among them.
        remarks: What a reader must know before any figure, most important first.
        interrupted: Where the user stopped it; empty if it ran to its end.
    """

    created_at: str
    tool: str
    command: str
    suite: str
    rounds: int
    threads: int | None
    machine: Machine
    pipeline: PipelineFacts
    cases: tuple[CaseResult, ...]
    residency: str = "resident"
    states: tuple[MachineState, ...] = ()
    remarks: tuple[str, ...] = ()
    interrupted: str = ""
    elapsed_s: float = 0.0
    schema_version: int = SCHEMA_VERSION


def report_to_json(report: Report) -> dict[str, Any]:  # Any: JSON data
    """Returns the document that `bench --json` prints."""
    from sdkit_dispatch.contract import record_to_json

    document: dict[str, Any] = record_to_json(report)
    return document
