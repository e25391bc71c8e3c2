"""A UNet of SD1.5's size built for an absent card: its time, size and memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdkit_tensorrt.build_memory import estimated_peak_bytes, machine_bytes

WEIGHTS = 859_520_964
"""Of SD1.5's UNet as diffusers counts them."""
PLAN_OVER_WEIGHTS = 1.05
"""Largest plan over the size of the float16 weights; 1.02 was measured."""
PEAK_OVER_ESTIMATE = 1.25
"""Largest peak over what was estimated before the build."""

BUILD = """
import json, resource, sys, time
from pathlib import Path
from sdkit_dispatch.contract import BuildRequest, Device, record_from_json
from sdkit_tensorrt.rtx_adapter import RtxAdapter
from tensorrt_full_unet import SHAPES
source, out = Path(sys.argv[1]), Path(sys.argv[2])
card = Device(
    id="sm_89", kind="discrete", maker="nvidia", name="sm_89", arch="sm_89", is_absent=True
)
plan = RtxAdapter().plan(card, None, {})
request = BuildRequest(
    vendor=plan.vendor, revision=1, runtime=plan.runtime, target=plan.target, component="unet",
    graph_digest="", weights_digest="", precision=plan.precision, shapes=SHAPES,
    options=plan.options,
)
started = time.monotonic()
RtxAdapter().compile(request, source, out, device=card, report=lambda progress: None)
print(json.dumps({
    "seconds": time.monotonic() - started,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "plan_bytes": (out / "engine.plan").stat().st_size,
}))
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="tensorrt-rtx-cu13-bindings, the runtime of tensorrt-rtx, is not installed",
)
@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is measured by POSIX")
def test_a_full_size_unet_is_built_within_the_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sdkit_tensorrt.plan_header import read_plan_header
    from tensorrt_full_unet import write_full_unet

    estimate = estimated_peak_bytes(2 * WEIGHTS)
    have = machine_bytes()
    if have is not None and have < estimate:
        pytest.skip(f"it takes {estimate / 1e9:.1f} GB of memory, there are {have / 1e9:.1f}")
    out = tmp_path / "out"
    out.mkdir()
    count = write_full_unet(tmp_path)
    assert count == pytest.approx(WEIGHTS, rel=1e-3)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path / "model.onnx"), str(out)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(
            f"\nfull-size UNet, sm_89, fp16: {measured['seconds']:.0f} s, plan "
            f"{measured['plan_bytes'] / 1e9:.2f} GB, peak {measured['peak_bytes'] / 1e9:.1f} GB "
            f"(estimated {estimate / 1e9:.1f})"
        )
    assert read_plan_header(out / "engine.plan").archs == ("sm_89",)
    assert measured["plan_bytes"] < PLAN_OVER_WEIGHTS * 2 * WEIGHTS
    assert measured["peak_bytes"] < PEAK_OVER_ESTIMATE * estimate
