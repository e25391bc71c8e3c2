"""LoRAs in exported pipelines: the numbers of diffusers and peft, and builds of real vendors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.lora import Lora
from sdkit_dispatch.lora.merged import merged_pipeline
from sdkit_dispatch.pipeline_files import read_pipeline

MODELS = Path(__file__).parents[1] / "models"
PIPELINES = MODELS / "pipelines"
LORAS = MODELS / "lora"
EXPORTS = [f"{family}-{style}" for family in ("sd15", "sdxl") for style in
           ("optimum", "torchscript", "dynamo")]  # fmt: skip
CASES = {
    "kohya": {"kohya": 0.8},
    "peft": {"peft": -0.6},
    "both": {"kohya": 0.5, "peft": 1.25},
}
"""As in record_lora.py."""
TOLERANCE = 2e-5
"""Largest difference from PyTorch of values up to 3: fp32 sums in another order. Without any LoRA
the exports differ from PyTorch as much."""
TOLERANCE_HALF = 4e-2
"""The same of a graph in half precision."""


def loras(family: str, case: str) -> list[Lora]:
    return [
        Lora(path=LORAS / f"{family}-{name}.safetensors", strength=strength)
        for name, strength in CASES[case].items()
    ]


def outputs(folder: Path, family: str) -> dict[str, np.ndarray]:
    """What ONNX Runtime computes of the recorded inputs."""
    onnxruntime = pytest.importorskip("onnxruntime")
    recorded = np.load(LORAS / f"{family}.npz", allow_pickle=False)
    found = {}
    for name in ("unet", "text_encoder", "text_encoder_2"):
        path = folder / name / "model.onnx"
        if not path.exists():
            continue
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        feeds = {
            one.name: recorded[f"inputs.{one.name}"].astype(
                {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int64)": "i8"}[one.type]
            )
            for one in session.get_inputs()
        }
        wanted = "out_sample" if name == "unet" else "last_hidden_state"
        found[name] = session.run([wanted], feeds)[0]
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return EngineStore(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*EXPORTS, "sd15-dynamo-fp16"])
def test_a_merged_pipeline_computes_what_peft_does(name, case, store):
    family = name.split("-")[0]
    base = read_pipeline(PIPELINES / name)
    merged = merged_pipeline(store, base, loras(family, case))
    merged.close()
    assert [one.unmatched for one in merged.loras] == [0] * len(merged.loras)
    recorded = np.load(LORAS / f"{family}.npz", allow_pickle=False)
    found = outputs(merged.folder, family)
    assert set(found) == set(base.components) - {"vae_decoder", "vae_encoder"}
    for part, values in found.items():
        limit = TOLERANCE_HALF if name.endswith("fp16") else TOLERANCE
        expected = recorded[f"{case}.{part}"]
        error = float(np.abs(values - expected).max())
        print(name, case, part, error)
        assert error < limit
        assert np.abs(expected - recorded[f"none.{part}"]).max() > 0.5
