"""One case measured: all entrants prepared, loaded, and timed in turns.

Turns are what makes ratios fair: in every round each entrant runs once, in an order that is
reversed from round to round, so whatever the machine does meets all of them alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from sdkit_dispatch.benchmark.entrants import Entrant, Image, Use, close_all
from sdkit_dispatch.benchmark.machine import Watch, cpu_seconds
from sdkit_dispatch.benchmark.records import CaseResult, CaseSpec, Row, Series, Versus
from sdkit_dispatch.benchmark.statistics import (
    Ratio,
    drift_of,
    machine_drift,
    paired_ratio,
    percentile,
)
from sdkit_dispatch.contract import GenerateRequest, Progress, Report
from sdkit_dispatch.diffusion.shapes import TEXT_COMPONENTS
from sdkit_dispatch.errors import DispatchError

WARM_UP_RUNS = 3
STEADY = 0.95
"""A run above this share of the one before it was not much faster: the warm-up is over. Engines
that map their weights read them from the disk in the first run of a process, and some in the next
(the cpu vendor's full-size UNet: 6.0 s, 3.8 s, then 2.5 s)."""
BLOCK_S = 0.1
"""A round runs each component for about this long, so that a short step is not lost in noise."""
IMAGE_BLOCK_S = 0.5
"""The same for images: long enough for CPU times that are read in ticks of 10 ms."""
MAX_BLOCK_RUNS = 50
IMAGE_BUDGET_S = 600.0
"""For all rounds of images together; what does not fit is computed from the components."""
FEWEST_IMAGE_ROUNDS = 3
IDLE_SHARE = 0.05
"""CPU time that a process may take while others have their turn, as a share of the time."""
IMAGE = "image"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: Of components.
        image_rounds: Of images; None: as many as `IMAGE_BUDGET_S` holds, at most `rounds`.
        is_resident: False loads one entrant at a time, in every round.
    """

    rounds: int
    image_rounds: int | None = None
    is_resident: bool = True


@dataclass(kw_only=True)
class Timings:
    """What one entrant was measured at: by thing, then by round."""

    wall_s: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    cpu_s: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(
        self, what: str, index: int, wall_s: Sequence[float], cpu_s: Sequence[float] = ()
    ) -> None:
        """Adds one block of runs."""
        self.wall_s.setdefault(what, {}).setdefault(index, []).extend(wall_s)
        if cpu_s:
            self.cpu_s.setdefault(what, {}).setdefault(index, []).extend(cpu_s)

    def series(self, what: str) -> Series | None:
        """Returns the figures of one thing; None if it was never measured."""
        rounds = self.wall_s.get(what)
        if not rounds:
            return None
        middles = [median(rounds[index]) * 1e3 for index in sorted(rounds)]
        single = [value * 1e3 for block in rounds.values() for value in block]
        cpu = [value for block in self.cpu_s.get(what, {}).values() for value in block]
        return Series(
            rounds_ms=tuple(middles),
            median_ms=median(middles),
            p90_ms=percentile(single, 0.9),
            runs=len(single),
            drift=drift_of(middles),
            cpu_ms=median(cpu) * 1e3 if cpu else None,
        )


class CaseMeasurement:
    """Measures the entrants of one case; holds what it has so far, for when it is interrupted."""

    def __init__(
        self,
        entrants: Sequence[Entrant],
        *,
        spec: CaseSpec,
        request: GenerateRequest,
        settings: Settings,
        watch: Watch,
        report: Report,
    ) -> None:
        self.entrants = list(entrants)
        self._spec = spec
        self._request = request
        self._settings = settings
        self._watch = watch
        self._report = report
        self._timings = {entrant.row.name: Timings() for entrant in entrants}
        self._blocks: dict[tuple[str, str], int] = {}
        self._images: dict[str, Any] = {}  # Any: numpy.ndarray
        self._out: set[str] = set()
        self._remarks: list[str] = []

    def run(self) -> None:
        """Measures everything; a failing entrant is out, and its row says why.

        Raises:
            KeyboardInterrupt: What was measured until then is in `result`.
        """
        try:
            self._prepare()
            self._load()
            self._components()
            if self._spec.images:
                self._whole_images()
        finally:
            close_all(self.entrants)

    def result(self) -> CaseResult:
        """Returns what was measured so far."""
        rows = [self._finished(entrant.row) for entrant in self.entrants]
        if any(row.is_rate_measured for row in rows):
            # A sum of components is no match for a measured loop with all that belongs to it.
            rows = [
                row if row.is_rate_measured else replace(row, images_per_minute=None)
                for row in rows
            ]
        rates = {
            name: [median(block) for _, block in sorted(timings.wall_s.get("unet", {}).items())]
            for name, timings in self._timings.items()
        }
        return CaseResult(
            spec=self._spec,
            rows=tuple(rows),
            versus=tuple(self._versus(rows)),
            drift=machine_drift({name: values for name, values in rates.items() if values}),
            remarks=tuple(self._remarks),
        )

    def _alive(self, use: Use | None = None) -> list[Entrant]:
        return [
            entrant
            for entrant in self.entrants
            if entrant.row.name not in self._out
            and (use != "components" or entrant.components)
            and (use != "images" or entrant.makes_images)
        ]

    def _try(self, entrant: Entrant, work: Callable[[], None]) -> bool:
        """Does something with an entrant, which is out if it fails."""
        try:
            work()
        except DispatchError as error:
            log.info("%s is out: %s", entrant.row.name, error.message)
            entrant.row = replace(entrant.row, failure=error.message, hint=error.hint)
            self._out.add(entrant.row.name)
            entrant.close()
            return False
        return True

    def _prepare(self) -> None:
        for index, entrant in enumerate(self.entrants):
            self._say(f"prepare {entrant.row.name}", index / len(self.entrants))
            self._try(entrant, entrant.prepare)

    def _load(self) -> None:
        alive = self._alive()
        for index, entrant in enumerate(alive):
            self._say(f"load {entrant.row.name}", index / len(alive))
            self._try(entrant, lambda entrant=entrant: self._load_one(entrant))  # type: ignore[misc]

    def _load_one(self, entrant: Entrant) -> None:
        use: Use = "components" if entrant.components else "images"
        was_dropped = entrant.forget_files()
        cold_s = _seconds_of(lambda: entrant.open(use))
        entrant.close()
        warm_s = _seconds_of(lambda: entrant.open(use))
        if use == "images" or not (entrant.makes_images and self._spec.images):
            entrant.close()
        entrant.row = replace(
            entrant.row, cold_load_s=cold_s if was_dropped else None, warm_load_s=warm_s
        )
        if entrant.makes_images and self._spec.images:
            entrant.close()

            def first() -> None:
                entrant.open("images")
                self._keep(entrant, entrant.image())

            first_s = _seconds_of(first)
            entrant.close()
            entrant.row = replace(entrant.row, first_image_s=first_s)

    def _keep(self, entrant: Entrant, image: Image) -> None:
        if image.pixels is not None:
            self._images[entrant.row.name] = image.pixels

    def _components(self) -> None:
        names = list(dict.fromkeys(name for one in self.entrants for name in one.components))

        def block(entrant: Entrant, index: int | None) -> None:
            for name in names:
                if name in entrant.components:
                    self._block(entrant, name, index)

        self._rounds("components", self._settings.rounds, block)

    def _block(self, entrant: Entrant, component: str, index: int | None) -> None:
        """Runs one block of a component; without an index it is the warm-up."""
        key = (entrant.row.name, component)
        if index is None:
            step_s = (
                min(entrant.run(component, WARM_UP_RUNS).wall_s)
                if self._settings.is_resident
                else _warm_up_s(entrant, component)
            )
            self._blocks[key] = max(1, min(MAX_BLOCK_RUNS, round(BLOCK_S / max(step_s, 1e-6))))
            return
        timing = entrant.run(component, self._blocks[key])
        self._timings[entrant.row.name].add(component, index, timing.wall_s, timing.cpu_s)

    def _whole_images(self) -> None:
        rounds = self._image_rounds()
        if not rounds:
            self._remarks.append(
                "images take too long here to be made in turns: images per minute are computed "
                "from the components"
            )
            return

        def block(entrant: Entrant, index: int | None) -> None:
            self._image_block(entrant, index)

        self._rounds("images", rounds, block)

    def _image_block(self, entrant: Entrant, index: int | None) -> None:
        """Makes images for about as long as a block lasts; without an index it warms up."""
        key = (entrant.row.name, IMAGE)
        before_s = _process_cpu_s(entrant)
        images = [entrant.image() for _ in range(self._blocks.get(key, 1))]
        after_s = _process_cpu_s(entrant)
        self._keep(entrant, images[-1])
        walls_s = [image.wall_s for image in images]
        if index is None:
            if key in self._blocks or not self._settings.is_resident:
                return
            self._blocks[key] = 1
            self._image_block(entrant, None)  # the first one of a process is slower
            runs = round(IMAGE_BLOCK_S / max(min(entrant.image().wall_s, *walls_s), 1e-6))
            self._blocks[key] = max(1, min(MAX_BLOCK_RUNS, runs))
            return
        cpu_s = [image.cpu_s for image in images if image.cpu_s is not None]
        if not cpu_s and before_s is not None and after_s is not None:
            cpu_s = [(after_s - before_s) / len(images)]
        self._timings[entrant.row.name].add(IMAGE, index, walls_s, cpu_s)

    def _image_rounds(self) -> int:
        if self._settings.image_rounds is not None:
            return self._settings.image_rounds
        first_s = [one.row.first_image_s for one in self._alive("images")]
        round_s = sum(value for value in first_s if value is not None)
        fitting = int(IMAGE_BUDGET_S / max(round_s, 1e-6))
        return min(self._settings.rounds, fitting) if fitting >= FEWEST_IMAGE_ROUNDS else 0

    def _rounds(self, use: Use, rounds: int, block: Callable[[Entrant, int | None], None]) -> None:
        """Gives every entrant its turn in every round, there and back again."""
        if self._settings.is_resident:
            for entrant in self._alive(use):
                self._say(f"warm up {entrant.row.name}", None)

                def warm_up(entrant: Entrant = entrant) -> None:
                    entrant.open(use)
                    block(entrant, None)

                self._try(entrant, warm_up)
        self._watch.read()
        idle = _IdleWatch(self._alive(use), self._timings)
        started_s = time.monotonic()
        for index in range(rounds):
            left = _left(started_s, index, rounds)
            self._say(f"{use}: round {index + 1} of {rounds}{left}", index / rounds)
            alive = self._alive(use)
            for entrant in alive if index % 2 == 0 else reversed(alive):
                self._try(entrant, lambda e=entrant, i=index: self._turn(use, e, i, block))  # type: ignore[misc]
            self._watch.read()
        if self._settings.is_resident and use == "components":
            self._remarks += idle.remarks()
        close_all(self.entrants)

    def _turn(
        self, use: Use, entrant: Entrant, index: int, block: Callable[[Entrant, int | None], None]
    ) -> None:
        if self._settings.is_resident:
            block(entrant, index)
            return
        entrant.open(use)
        try:
            block(entrant, None)
            block(entrant, index)
        finally:
            entrant.close()

    def _say(self, phase: str, fraction: float | None) -> None:
        self._report(Progress(phase=f"bench: {phase}", fraction=fraction))

    def _finished(self, row: Row) -> Row:
        timings = self._timings[row.name]
        components = {
            name: series
            for name in timings.wall_s
            if name != IMAGE and (series := timings.series(name)) is not None
        }
        image = timings.series(IMAGE)
        row = replace(row, components=components, image=image)
        rate, is_measured = _rate(row, self._request)
        return replace(
            row,
            images_per_minute=rate,
            is_rate_measured=is_measured,
            image_error=self._image_error(row),
        )

    def _image_error(self, row: Row) -> float | None:
        reference, mine = self._images.get("cpu"), self._images.get(row.name)
        if reference is None or mine is None or reference.shape != mine.shape:
            return None
        return float(abs(mine.astype("float64") - reference.astype("float64")).mean())

    def _versus(self, rows: Sequence[Row]) -> list[Versus]:
        """Returns every vendor against its own bare runtime and against the best peer."""
        found = []
        vendors = [row for row in rows if row.kind == "vendor"]
        for row in vendors:
            bare = next((one for one in rows if one.name == f"{row.name} (bare)"), None)
            if bare is not None:
                found += [self._against(row, bare, name) for name in row.components]
        for what in ("unet", IMAGE):
            timed = [row for row in rows if _median_of(row, what) is not None]
            peers = [row for row in timed if row.kind == "peer"]
            for row in (row for row in timed if row.kind == "vendor"):
                found += [self._against(row, peer, what) for peer in peers]
            ours = sorted((row for row in timed if row.kind == "vendor"), key=_by(what))
            found += [self._against(ours[0], other, what) for other in ours[1:]]
        return [one for one in found if one is not None]

    def _against(self, row: Row, other: Row, what: str) -> Versus | None:
        mine, theirs = self._timings[row.name], self._timings[other.name]
        ratio = _ratio(mine.wall_s.get(what, {}), theirs.wall_s.get(what, {}))
        if ratio is None:
            return None
        return Versus(
            of=row.name,
            other=other.name,
            what=what,
            ratio=ratio,
            cpu_ratio=_ratio(mine.cpu_s.get(what, {}), theirs.cpu_s.get(what, {})),
        )


class _IdleWatch:
    """Notices a process that computes while others have their turn."""

    def __init__(self, entrants: Sequence[Entrant], timings: Mapping[str, Timings]) -> None:
        self._timings = timings
        self._entrants = entrants
        self._started_s = time.monotonic()
        self._before = {one.row.name: (self._used(one), self._told(one)) for one in entrants}

    def remarks(self) -> list[str]:
        """Returns a sentence for each process that did."""
        elapsed_s = time.monotonic() - self._started_s
        remarks = []
        for entrant in self._entrants:
            used, before = self._used(entrant), self._before[entrant.row.name]
            if used is None or before[0] is None:
                continue
            idle_s = used - before[0] - (self._told(entrant) - before[1])
            if idle_s > IDLE_SHARE * elapsed_s:
                remarks.append(
                    f"the process of {entrant.row.name} computed for {idle_s:.1f} s of "
                    f"{elapsed_s:.1f} s outside of its own runs"
                )
        return remarks

    @staticmethod
    def _used(entrant: Entrant) -> float | None:
        return _process_cpu_s(entrant)

    def _told(self, entrant: Entrant) -> float:
        blocks = self._timings[entrant.row.name].cpu_s.values()
        return sum(sum(runs) for rounds in blocks for runs in rounds.values())


def _process_cpu_s(entrant: Entrant) -> float | None:
    pid = entrant.pid()
    return None if pid is None else cpu_seconds(pid)


def _ratio(
    mine: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]
) -> Ratio | None:
    """Returns the ratio over the rounds that both have; None if there is none, or a zero in it."""
    common = sorted(set(mine) & set(theirs))
    pairs = [(median(mine[index]), median(theirs[index])) for index in common]
    if not pairs or not all(other > 0 for _, other in pairs):
        return None
    return paired_ratio(*zip(*pairs, strict=True))


def _rate(row: Row, request: GenerateRequest) -> tuple[float | None, bool]:
    """Returns images per minute, and whether that was measured."""
    if row.image is not None:
        return 60e3 * request.batch / row.image.median_ms, True
    times = {name: series.median_ms for name, series in row.components.items()}
    if not {"text_encoder", "unet", "vae_decoder"} <= set(times):
        return None, False
    prompts = 2 if request.guidance > 1 else 1
    image_ms = request.steps * times["unet"] + times["vae_decoder"]
    image_ms += prompts * sum(times.get(name, 0.0) for name in TEXT_COMPONENTS)
    return 60e3 * request.batch / image_ms, False


def _median_of(row: Row, what: str) -> float | None:
    series = row.image if what == IMAGE else row.components.get(what)
    return None if series is None else series.median_ms


def _by(what: str) -> Callable[[Row], float]:
    return lambda row: _median_of(row, what) or 0.0


def _warm_up_s(entrant: Entrant, component: str) -> float:
    """Runs a component until that gets no faster, `WARM_UP_RUNS` times at most.

    Returns:
        The seconds of the last run.
    """
    (last_s,) = entrant.run(component, 1).wall_s
    for _ in range(1, WARM_UP_RUNS):
        before_s = last_s
        (last_s,) = entrant.run(component, 1).wall_s
        if last_s > STEADY * before_s:
            break
    return last_s


def _seconds_of(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _left(started_s: float, done: int, planned: int) -> str:
    if not done:
        return ""
    left_s = (time.monotonic() - started_s) * (planned - done) / done
    return f", {left_s:.0f} s left" if left_s < 90 else f", {left_s / 60:.0f} min left"
