"""What only an AMD card with ROCm can show of MIGraphX.

Never run yet. Each test skips with the reason that the vendor itself gives.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import BuildRequest, Device, Engine, Rejection
from sdkit_onnxruntime import MIGRAPHX

sys.path.insert(0, str(Path(__file__).parents[1] / "vendors"))

from vendor_harness import SAMPLE, SHAPES, feeds_for, snapshot

pytestmark = pytest.mark.device

HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11."""


def built(component: str, out: Path, **options: Any) -> tuple[Any, Engine, Device]:
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime-migraphx, the runtime of migraphx, is not installed")
    from sdkit_dispatch.detect import detect
    from sdkit_onnxruntime.migraphx import MigraphxAdapter

    cards = [one for one in detect() if one.maker == "amd" and one.kind != "cpu"]
    if not cards:
        pytest.skip("there is no AMD card here")
    adapter, card = MigraphxAdapter(), cards[0]
    plan = adapter.plan(card, None, options)
    if isinstance(plan, Rejection):
        pytest.skip(f"{plan.vendor}: {plan.reason}")
    path = SAMPLE / component / "model.onnx"
    request = BuildRequest(
        vendor=plan.vendor,
        revision=MIGRAPHX.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES[component],
        options=plan.options,
    )
    out.mkdir()
    adapter.compile(request, path, out, device=card, report=lambda progress: None)
    engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(path))
    return adapter, engine, card


@pytest.mark.parametrize("component", SHAPES)
def test_every_component_runs_on_the_card_with_the_right_numbers(
    component: str, tmp_path: Path
) -> None:
    adapter, engine, card = built(component, tmp_path / "out")
    before = snapshot(Path(engine.folder))
    session = adapter.load(engine, card)
    assert "CPUExecutionProvider" not in session.facts["nodes"]
    for seed in range(2):
        feeds = feeds_for(session.inputs, seed)
        wanted: Any = ReferenceEvaluator(engine.onnx).run(None, feeds)
        for array, expected in zip(session.run(feeds).values(), wanted, strict=True):
            np.testing.assert_allclose(array, expected, rtol=0, atol=HALF_TOLERANCE)
    session.close()
    assert snapshot(Path(engine.folder)) == before


def test_an_engine_that_was_moved_is_opened_and_not_compiled_again(tmp_path: Path) -> None:
    from dataclasses import replace

    adapter, engine, card = built("vae_decoder", tmp_path / "out")
    moved = tmp_path / "elsewhere"
    Path(engine.folder).rename(moved)
    adapter.load(replace(engine, folder=str(moved)), card).close()
