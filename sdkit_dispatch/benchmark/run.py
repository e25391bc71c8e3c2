"""A whole benchmark: who takes part, every case of the grid, and the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sdkit_dispatch.benchmark.entrants import BareEntrant, Entrant, VendorEntrant, has_bare
from sdkit_dispatch.benchmark.machine import Watch, free_memory_bytes, machine_of, remarks_on
from sdkit_dispatch.benchmark.measure import CaseMeasurement, Settings
from sdkit_dispatch.benchmark.peers import peer_entrants
from sdkit_dispatch.benchmark.records import CaseResult, CaseSpec, PipelineFacts, Report, Row
from sdkit_dispatch.benchmark.suites import Suite
from sdkit_dispatch.contract import GenerateRequest, Plan
from sdkit_dispatch.errors import ConfigError, PipelineError
from sdkit_dispatch.pipeline_files import Pipeline
from sdkit_dispatch.version import __version__
from sdkit_dispatch.wanted import Wanted, wanted

if TYPE_CHECKING:
    from sdkit_dispatch.api import Dispatcher
    from sdkit_dispatch.choice import Choice

ALL = "all"
MEMORY_PER_WEIGHT = 2.2
"""Memory of a loaded pipeline over its weights: 1.1 to 2.1 was seen on CPUs, and images on top."""
MEMORY_SHARE = 0.8
"""Of the free memory that all entrants together may take, before they are loaded in turns."""
DIGEST_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure; None is what the suite, the profile or the pipeline says.

    Attributes:
        vendors: Names, or ("all",): every one that is ready here.
        peers: The same; empty for none.
        sizes: (width, height) pairs.
        image_rounds: None: as many as fit into some minutes; 0: components only.
        checkpoint: Of the same network, for peers that take one.
    """

    vendors: tuple[str, ...] = (ALL,)
    peers: tuple[str, ...] = ()
    suite: Suite | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    batches: tuple[int, ...] = ()
    steps: int | None = None
    rounds: int = 15
    image_rounds: int | None = None
    checkpoint: Path | None = None
    command: str = ""


@dataclass(kw_only=True)
class Benchmark:
    """Runs once; `report` is complete at any time, also after Ctrl-C."""

    dispatcher: Dispatcher
    pipeline: Pipeline
    choice: Choice
    options: Options
    _cases: list[CaseResult] = field(default_factory=list)
    _remarks: list[str] = field(default_factory=list)
    _residency: str = "resident"
    _interrupted: str = ""
    _started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._entrants: list[Entrant] = []
        self._watch = Watch(self._pids)
        suite = self.options.suite
        if suite is not None and self.pipeline.family != suite.family:
            raise PipelineError(
                f"the suite '{suite.name}' is for pipelines of the family '{suite.family}', and "
                f"'{self.pipeline.folder.name}' is '{self.pipeline.family}'",
                "leave --suite out, or give another pipeline",
            )

    def run(self) -> Report:
        """Measures all cases. Ctrl-C ends it early and keeps what was measured.

        Raises:
            ConfigError: A value is out of range, or a vendor or peer is unknown.
            PipelineError: The pipeline cannot be read.
        """
        self._watch.read()
        for request, spec in self._requests():
            measurement = self._measurement(request, spec)
            try:
                measurement.run()
            except KeyboardInterrupt:
                size = f"{spec.width_px}x{spec.height_px}, batch {spec.batch}"
                self._interrupted = f"in the case {size}"
            self._cases.append(self._with_missing(measurement.result()))
            if self._interrupted:
                break
        self._watch.read()
        return self.report()

    def report(self) -> Report:
        """Returns what was measured so far."""
        machine = machine_of(self.dispatcher.devices)
        pipeline = self.pipeline
        return Report(
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            tool=f"sdkit-dispatch {__version__}",
            command=self.options.command,
            suite=self.options.suite.name if self.options.suite else "",
            rounds=self.options.rounds,
            threads=self.dispatcher.config.threads,
            machine=machine,
            pipeline=PipelineFacts(
                name=pipeline.folder.name,
                family=pipeline.family,
                graphs=self._graphs,
                weights_bytes={
                    name: part.weights_bytes for name, part in pipeline.components.items()
                },
            ),
            cases=tuple(self._cases),
            residency=self._residency,
            states=tuple(self._watch.states),
            remarks=tuple(
                dict.fromkeys(
                    [
                        *self._remarks,
                        *remarks_on(self._watch.states, machine.processors),
                        *(_drift_remarks(case) for case in self._cases if _drift_remarks(case)),
                    ]
                )
            ),
            interrupted=self._interrupted,
            elapsed_s=round(time.monotonic() - self._started_s, 1),
        )

    def _pids(self) -> list[int]:
        return [pid for one in self._entrants if (pid := one.pid()) is not None]

    def _requests(self) -> Iterator[tuple[GenerateRequest, CaseSpec]]:
        suite, options = self.options.suite, self.options
        prompt = suite.prompt if suite else "a red seven"
        base = self.dispatcher.request(
            self.pipeline,
            self.choice,
            prompt=prompt,
            width_px=suite.width_px if suite else None,
            height_px=suite.height_px if suite else None,
            steps=options.steps or (suite.steps if suite else None),
            guidance=suite.guidance if suite else None,
            seed=suite.seed if suite else 0,
            batch=suite.batch if suite else None,
            scheduler=suite.scheduler if suite else "ddim",
        )
        for width_px, height_px in options.sizes or ((base.width_px, base.height_px),):
            for batch in options.batches or (base.batch,):
                request = replace(base, width_px=width_px, height_px=height_px, batch=batch)
                is_suite = suite is not None and request == base and options.steps is None
                yield (
                    request,
                    CaseSpec(
                        width_px=width_px,
                        height_px=height_px,
                        batch=batch,
                        steps=request.steps,
                        guidance=request.guidance,
                        scheduler=request.scheduler,
                        seed=request.seed,
                        prompt=request.prompt,
                        suite=suite.name if suite and is_suite else "",
                        images=options.image_rounds != 0,
                    ),
                )

    def _measurement(self, request: GenerateRequest, spec: CaseSpec) -> CaseMeasurement:
        want = wanted(self.pipeline, request, token_chunks=1, memo=self.dispatcher.store.memo)
        self._graphs = {name: want.digests[name][0][:DIGEST_SHOWN] for name in want.shapes}
        self._entrants = self._made(want)
        is_resident = self._fits(len(self._entrants))
        if not is_resident:
            self._residency = "reloaded"
        return CaseMeasurement(
            self._entrants,
            spec=spec,
            request=request,
            settings=Settings(
                rounds=self.options.rounds,
                image_rounds=self.options.image_rounds,
                is_resident=is_resident,
            ),
            watch=self._watch,
            report=self.dispatcher.report,
        )

    def _made(self, want: Wanted) -> list[Entrant]:
        entrants: list[Entrant] = []
        self._missing: list[Row] = []
        plans = self._plans()
        for plan, label in zip(plans, _labels(plans), strict=True):
            choice = replace(self.choice, vendor=plan.vendor)
            entrants.append(
                VendorEntrant(
                    dispatcher=self.dispatcher, choice=choice, plan=plan, want=want, label=label
                )
            )
            if has_bare(self.dispatcher, plan.vendor):
                entrants.append(
                    BareEntrant(dispatcher=self.dispatcher, plan=plan, want=want, label=label)
                )
        peers, missing = peer_entrants(
            self.dispatcher,
            self.choice,
            want=want,
            names=self.options.peers,
            checkpoint=self.options.checkpoint,
        )
        self._missing += missing
        return [*entrants, *peers]

    def _plans(self) -> list[Plan]:
        """Returns the plans that take part; whoever does not is a row with its reason."""
        names = self.options.vendors
        if names == (ALL,):
            decisions = [self.dispatcher.plan(self.choice)]
        else:
            decisions = [self.dispatcher.plan(replace(self.choice, vendor=name)) for name in names]
        plans: list[Plan] = []
        for decision, name in zip(decisions, names, strict=True):
            for plan in decision.plans:
                if self.dispatcher.specs[plan.vendor].takes != "onnx":
                    self._missing.append(
                        Row(
                            name=plan.vendor,
                            kind="vendor",
                            vendor=plan.vendor,
                            device=plan.device.id,
                            failure="it takes whole checkpoints, and this is a folder of ONNX "
                            "graphs",
                        )
                    )
                elif plan.state == "ready" or self.dispatcher.may_install:
                    plans.append(plan)
                else:
                    self._missing.append(
                        Row(
                            name=plan.vendor,
                            kind="vendor",
                            device=plan.device.id,
                            failure="it is not installed",
                            hint=f"sdkit-dispatch vendors install {plan.vendor}",
                        )
                    )
            for no in decision.rejections:
                is_asked = name in (ALL, no.vendor) and no.code not in ("not-selected",)
                if is_asked and (name != ALL or no.code != "only-when-named"):
                    self._missing.append(
                        Row(
                            name=no.vendor,
                            kind="vendor",
                            device=no.device,
                            failure=no.reason,
                            hint=no.hint,
                        )
                    )
        return plans

    def _fits(self, count: int) -> bool:
        free = free_memory_bytes()
        weights = sum(part.weights_bytes for part in self.pipeline.components.values())
        return free is None or count * weights * MEMORY_PER_WEIGHT <= MEMORY_SHARE * free

    def _with_missing(self, case: CaseResult) -> CaseResult:
        return replace(case, rows=(*case.rows, *self._missing))


def _labels(plans: Sequence[Plan]) -> list[str]:
    """Returns a name for the row of each plan; a vendor may serve several devices here."""
    labels: list[str] = []
    for plan in plans:
        label = plan.vendor
        if sum(one.vendor == plan.vendor for one in plans) > 1:
            label = f"{plan.vendor} on {plan.device.kind}"
        number, unique = 1, label
        while unique in labels:
            number += 1
            unique = f"{label} {number}"
        labels.append(unique)
    return labels


def _drift_remarks(case: CaseResult) -> str:
    if case.drift is None or not case.drift.is_flagged:
        return ""
    way = "slower" if case.drift.change > 0 else "faster"
    return (
        f"the machine became {abs(case.drift.change):.0%} {way} while {case.spec.width_px}x"
        f"{case.spec.height_px} was measured: compare ratios, not times"
    )


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Returns "512,768x512" as ((512, 512), (768, 512)).

    Raises:
        ConfigError: It is not such a list.
    """
    sizes = []
    for part in filter(None, text.replace(" ", "").split(",")):
        width, _, height = part.lower().partition("x")
        if not width.isdigit() or not (height or width).isdigit():
            raise ConfigError(f"--sizes has {part!r}, which is no size", "--sizes 512,768x512")
        sizes.append((int(width), int(height or width)))
    return tuple(sizes)


def parse_numbers(text: str, *, flag: str) -> tuple[int, ...]:
    """Returns "1,2,4" as (1, 2, 4).

    Raises:
        ConfigError: It is not such a list.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdigit() or int(part) < 1]
    if wrong:
        raise ConfigError(f"{flag} has {wrong[0]!r}, which is no count", f"{flag} 1,2,4")
    return tuple(int(part) for part in parts)


def parse_names(text: str) -> tuple[str, ...]:
    """Returns "cpu, openvino" as ("cpu", "openvino")."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
