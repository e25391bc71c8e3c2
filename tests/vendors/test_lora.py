"""LoRAs in exported pipelines: the numbers of diffusers and peft, and builds of real vendors."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from sdkit_dispatch import Choice, Dispatcher
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.config import Config
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.lora import Lora
from sdkit_dispatch.lora.merged import merged_pipeline
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_ggml import SPEC as GGML

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


VENDORS = {"cpu": "onnxruntime", "ggml": GGML.runtime_packages[-1], "openvino": "openvino"}
SIZE = {"width_px": 64, "height_px": 64, "steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def phases():
    return []


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory, phases):
    def report(progress):
        phases.append(progress.phase)

    home = tmp_path_factory.mktemp("home")
    with Dispatcher(home=home, config=Config(threads=1), report=report) as running:
        yield running


def outside(name: str, folder: Path) -> Path:
    """Copies a pipeline, with all matrices and kernels in external files, as of a large one."""
    shutil.copytree(PIPELINES / name, folder)
    for part in ("unet", "text_encoder"):
        path = folder / part / "model.onnx"
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if len(tensor.dims) > 1 and tensor.data_type == onnx.TensorProto.FLOAT:
                onnx.external_data_helper.set_external_data(tensor, "model.onnx_data")
        onnx.save_model(model, path)
    return folder


def needs(vendor: str) -> None:
    try:
        importlib.metadata.distribution(VENDORS[vendor])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{VENDORS[vendor]} is not installed")


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_then_b_then_a_draws_the_first_picture_again(vendor, dispatcher):
    """TensorRT#3628: there the third picture is a mix of the first two."""
    needs(vendor)
    choice = Choice(gpu="cpu", vendor=vendor, must_check=False)

    def drawn(*wanted: Lora):
        loaded = dispatcher.load(PIPELINES / "sd15-dynamo", choice, loras=wanted)
        answer = loaded.generate("a red cat", **SIZE)
        assert answer.steps == ()
        assert [one.name for one in answer.loras] == [one.path.stem for one in wanted]
        return answer

    a, b = (loras("sd15", case) for case in ("kohya", "peft"))
    none, a1, b2, a3 = drawn(), drawn(*a), drawn(*b), drawn(*a)
    zero = drawn(Lora(path=a[0].path, strength=0))
    assert np.array_equal(a1.latents, a3.latents)
    assert np.array_equal(none.latents, zero.latents)
    pictures = [none.latents, a1.latents, b2.latents]
    for index, one in enumerate(pictures):
        assert all(np.abs(one - other).max() > 0.01 for other in pictures[:index])


def test_ggml_compiles_no_program_again_for_a_lora(dispatcher, phases, tmp_path):
    needs("ggml")
    folder = outside("sd15-dynamo", tmp_path / "pipeline")
    choice, size = Choice(gpu="cpu", vendor="ggml"), {"width_px": 72, "height_px": 64}
    dispatcher.build(folder, choice, **size)
    assert "ggml: lower unet" in phases
    for case in ("kohya", "peft", "both"):
        del phases[:]
        built = dispatcher.build(folder, choice, loras=loras("sd15", case), **size)
        assert [one.is_hit for one in built.components] == [False, False, True]
        assert all(one.manifest.verdict.status == "passed" for one in built.components)
        assert "ggml: write the weights of unet" in phases
        assert not [one for one in phases if "lower" in one]


def test_a_checkpoint_that_is_taken_whole_takes_no_lora(dispatcher, tmp_path):
    path = tmp_path / "model.safetensors"
    shutil.copy(LORAS / "sd15-peft.safetensors", path)
    for act in (dispatcher.load, dispatcher.build):
        with pytest.raises(ConfigError, match=r"taken? whole|takes whole"):
            act(path, Choice(vendor="sdcpp"), loras=loras("sd15", "kohya"))
