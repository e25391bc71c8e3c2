"""Measures our sessions against the bare runtimes, side by side in one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdkit_dispatch.contract import Plan, Progress, Shapes
from sdkit_dispatch.errors import DispatchError
from sdkit_dispatch.pipeline_files import Component, Pipeline
from sdkit_dispatch.wanted import wanted

if TYPE_CHECKING:
    from sdkit_dispatch.api import Dispatcher
    from sdkit_dispatch.choice import Choice

COMPONENT = "unet"
WARM_UP_RUNS = 3
BLOCK_S = 0.1
"""A round runs each side for about this long, so that a short step is not lost in the noise."""
MAX_BLOCK_RUNS = 50


@dataclass(frozen=True, kw_only=True)
class QuickRow:
    """One vendor's UNet step: ours against the bare runtime's, same inputs, same threads.

    Attributes:
        ours_ms: Median over the rounds of the step as the denoising loop takes it.
        bare_ms: The same of the runtime used directly, as its own documentation shows.
        ratio: Median over the rounds of ours / bare, each pair measured back to back.
        low: Lower quartile of that ratio.
        high: Upper quartile of that ratio.
        failure: Why there are no figures; empty if there are.
    """

    vendor: str
    device: str
    runtime: str = ""
    ours_ms: float | None = None
    bare_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    failure: str = ""


def quick_benchmark(
    dispatcher: Dispatcher, pipeline: str | Path, choice: Choice, *, rounds: int
) -> list[QuickRow]:
    """Measures every vendor that is ready here; each pair of sides is interleaved (A B, B A).

    Raises:
        PipelineError: The pipeline cannot be read.
    """
    from sdkit_dispatch.choice import sample_choice

    choice = sample_choice(pipeline, choice)
    read = dispatcher.read(pipeline)
    rows = []
    for plan in dispatcher.plan(choice).plans:
        if plan.state != "ready":
            continue
        dispatcher.report(Progress(phase=f"bench: {plan.vendor}"))
        try:
            rows.append(_row(dispatcher, read, choice, plan, rounds))
        except DispatchError as error:
            rows.append(QuickRow(vendor=plan.vendor, device=plan.device.id, failure=error.message))
    return rows


def _row(
    dispatcher: Dispatcher, pipeline: Pipeline, choice: Choice, plan: Plan, rounds: int
) -> QuickRow:
    request = dispatcher.request(pipeline, choice, prompt="")
    want = wanted(pipeline, request, token_chunks=1, memo=dispatcher.store.memo)
    _, built = dispatcher.builder(replace(choice, vendor=plan.vendor)).build_with(
        want, plan, dispatcher.report
    )
    engine = next(part.engine for part in built if part.component == COMPONENT)
    component, shapes = pipeline.components[COMPONENT], want.shapes[COMPONENT]
    feeds = seeded_feeds(component, shapes)
    spec = dispatcher.specs[plan.vendor]
    with dispatcher.workers.fresh(spec) as ours, dispatcher.workers.fresh(spec) as bare:
        session = ours.load(engine, plan.device)

        def run_ours(runs: int) -> float:
            return statistics.median(session.time(COMPONENT, feeds, runs=runs).wall_s)

        def run_bare(runs: int) -> float:
            timing = bare.time_bare(component.onnx, shapes, plan.device, feeds, runs=runs)
            return statistics.median(timing.wall_s)

        run_ours(WARM_UP_RUNS)
        step_s = run_bare(WARM_UP_RUNS)
        runs = max(1, min(MAX_BLOCK_RUNS, round(BLOCK_S / max(step_s, 1e-6))))
        ours_s, bare_s = [], []
        for index in range(rounds):
            dispatcher.report(Progress(phase=f"bench: {plan.vendor}", fraction=index / rounds))
            if index % 2:
                bare_s.append(run_bare(runs))
                ours_s.append(run_ours(runs))
            else:
                ours_s.append(run_ours(runs))
                bare_s.append(run_bare(runs))
    ratio, low, high = ratio_of(ours_s, bare_s)
    return QuickRow(
        vendor=plan.vendor,
        device=plan.device.id,
        runtime=plan.runtime,
        ours_ms=statistics.median(ours_s) * 1e3,
        bare_ms=statistics.median(bare_s) * 1e3,
        ratio=ratio,
        low=low,
        high=high,
        rounds=rounds,
    )


def ratio_of(ours_s: Sequence[float], bare_s: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the quartiles of the ratios of pairs, ours / bare."""
    ratios = [ours / bare for ours, bare in zip(ours_s, bare_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def seeded_feeds(component: Component, shapes: Shapes) -> dict[str, Any]:  # Any: numpy.ndarray
    """Returns normal noise for every input; a timestep is 500, whole numbers are 0."""
    import numpy as np

    rng = np.random.default_rng(1)
    feeds: dict[str, Any] = {}
    for tensor in component.inputs:
        shape = shapes[tensor.name]
        if tensor.name == "timestep":
            feeds[tensor.name] = np.full(shape, 500, tensor.dtype)
        elif tensor.dtype.startswith("float"):
            feeds[tensor.name] = np.asarray(rng.standard_normal(shape), dtype=tensor.dtype)
        else:
            feeds[tensor.name] = np.zeros(shape, tensor.dtype)
    return feeds
