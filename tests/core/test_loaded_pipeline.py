"""Images of a toy pipeline with the null vendor: what runs is what was asked for, or it is said."""

import json
import math
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.contract import Rejection
from sdkit_dispatch.errors import CompileError, ConfigError, WorkerError
from sdkit_dispatch.loaded_pipeline import require_writable
from toy_pipeline import SIDE_PX, make_toy_pipeline

NULL = Choice(vendor="null", gpu="cpu", must_check=False)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    with Dispatcher(home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def pipeline(tmp_path):
    return make_toy_pipeline(tmp_path / "pipeline", external=True)


def loaded_with(dispatcher, pipeline, *options):
    """A pipeline whose ladder is the null vendor with these options, one after the other."""
    loaded = dispatcher.load(pipeline, NULL)
    cpu = loaded.plans[0].device
    spec = dispatcher.specs["null"]
    loaded.plans = [dispatcher.workers.probe(spec, cpu, None, one) for one in options]
    assert not any(isinstance(plan, Rejection) for plan in loaded.plans)
    return loaded


def test_tensorrt_3628_weights_a_b_a_in_a_worker_that_already_runs(dispatcher, pipeline):
    before = dispatcher.load(pipeline, NULL).generate("a fox", steps=2)
    data = pipeline / "unet" / "model.onnx_data"
    first = data.read_bytes()
    weights = np.frombuffer(first, np.float32).copy()
    weights[:144] *= -1  # the kernel; the integers behind it stay
    model = onnx.load(pipeline / "unet" / "model.onnx", load_external_data=False)
    assert model.graph.initializer[0].name == "kernel"
    data.write_bytes(weights.tobytes())
    after = dispatcher.load(pipeline, NULL).generate("a fox", steps=2)
    assert after.facts()["engines"]["unet"] != before.facts()["engines"]["unet"]
    assert np.abs(after.latents - before.latents).max() > 0.01
    with Dispatcher(home=dispatcher.home) as fresh:
        alone = fresh.load(pipeline, NULL).generate("a fox", steps=2)
    np.testing.assert_array_equal(after.latents, alone.latents)
    data.write_bytes(first)
    third = dispatcher.load(pipeline, NULL).generate("a fox", steps=2)
    np.testing.assert_array_equal(third.latents, before.latents)
    np.testing.assert_array_equal(third.images, before.images)


def test_changed_settings_are_used_by_a_worker_that_already_runs(dispatcher, pipeline):
    before = dispatcher.load(pipeline, NULL).generate("a fox", steps=2)
    config = json.loads((pipeline / "vae_decoder" / "config.json").read_text())
    config["scaling_factor"] *= 4
    (pipeline / "vae_decoder" / "config.json").write_text(json.dumps(config))
    after = dispatcher.load(pipeline, NULL).generate("a fox", steps=2)
    assert (after.images != before.images).any()


def test_another_precision_runs_its_own_engines(dispatcher, pipeline):
    dispatcher.load(pipeline, NULL).generate("a fox", steps=1)
    half = Choice(vendor="null", gpu="cpu", must_check=False, precision="fp16")
    answer = dispatcher.load(pipeline, half).generate("a fox", steps=1)
    assert answer.plan.precision == "fp16"
    assert {facts["precision"] for facts in answer.ran.values()} == {"fp16"}


def test_a_batch_equals_its_images_alone(dispatcher, pipeline):
    loaded = dispatcher.load(pipeline, NULL)
    together = loaded.generate("a fox", steps=2, batch=3, seed=4)
    assert together.seeds == (4, 5, 6)
    alone = loaded.generate("a fox", steps=2, seed=6)
    np.testing.assert_allclose(together.latents[2], alone.latents[0], atol=1e-5)


@pytest.mark.parametrize("fault", ["crash_on_run", "run_error", "nan", "crash_on_load"])
def test_a_failure_while_running_takes_the_next_step_and_says_why(dispatcher, pipeline, fault):
    loaded = loaded_with(dispatcher, pipeline, {"fault": fault, "compile_steps": 5}, {})
    answer = loaded.generate("a fox", steps=1)
    (step,) = answer.steps
    assert step.vendor == "null"
    assert answer.facts()["steps"][0]["reason"] == step.reason
    again = loaded.generate("a fox", steps=1)
    assert again.steps == answer.steps  # the failed way was not tried again


def test_when_the_last_step_fails_every_reason_is_listed(dispatcher, pipeline):
    loaded = loaded_with(dispatcher, pipeline, {"fault": "compile_error"}, {"fault": "run_error"})
    with pytest.raises(CompileError, match=r"(?s)none of 2.*refuses this graph.*device failed"):
        loaded.generate("a fox", steps=1)


def test_one_way_alone_raises_its_own_error(dispatcher, pipeline):
    loaded = loaded_with(dispatcher, pipeline, {"fault": "crash_on_run", "compile_steps": 7})
    with pytest.raises(WorkerError, match="died"):
        loaded.generate("a fox", steps=1)


def test_a_request_that_overflows_bans_nothing(dispatcher, pipeline):
    loaded = loaded_with(dispatcher, pipeline, {"fault": "nan", "compile_steps": 9}, {})
    loaded.generate("a fox", steps=1)
    again = loaded_with(dispatcher, pipeline, {"fault": "nan", "compile_steps": 9}, {})
    assert len(again.generate("a fox", steps=1).steps) == 1
    assert "not tried again" not in again._steps[0].reason


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 10**6}, "steps"),
        ({"batch": 0}, "batch"),
        ({"guidance": math.nan}, "guidance"),
        ({"guidance": math.inf}, "guidance"),
        ({"guidance": -1.0}, "guidance"),
        ({"width_px": 0}, "width"),
        ({"width_px": SIDE_PX + 1}, "nearest"),
        ({"height_px": 10**9}, "height"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"scheduler": "eular"}, "eular"),
        ({"negative_prompt": "\udcff"}, "negative"),
    ],
)
def test_values_out_of_range_are_named(dispatcher, pipeline, values, words):
    with pytest.raises(ConfigError) as caught:
        dispatcher.load(pipeline, NULL).generate("a fox", **values)
    assert words in f"{caught.value}"


def test_an_unchecked_engine_is_said(dispatcher, pipeline):
    answer = dispatcher.load(pipeline, NULL).generate("a fox", steps=1)
    assert set(answer.unchecked) == {"text_encoder", "unet", "vae_decoder"}
    assert answer.facts()["verdicts"]["unet"] == "unchecked"


def test_a_batch_is_saved_as_numbered_files_with_their_facts(dispatcher, pipeline, tmp_path):
    answer = dispatcher.load(pipeline, NULL).generate("a fox", steps=1, batch=2, seed=3)
    files = answer.save(tmp_path / "new folder" / "x.png")
    assert [file.name for file in files] == ["x-1.png", "x-2.png"]
    with Image.open(files[1]) as picture:
        facts = json.loads(picture.text["sdkit_dispatch"])
        assert facts["seed"] == 4
        assert facts["vendor"] == "null"


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        require_writable(tmp_path / "folder.png")
    with pytest.raises(ConfigError, match=r"\.png"):
        require_writable(tmp_path / "x.jpg")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        require_writable(tmp_path / "file" / "x.png")
    require_writable(tmp_path / "deep" / "x.png")
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="permission denied"):
            require_writable(tmp_path / "closed" / "x.png")


def test_a_pipeline_folder_may_have_any_name(dispatcher, tmp_path):
    for name in ("with space", "модель", "画像"):
        folder = make_toy_pipeline(Path(tmp_path, name))
        assert dispatcher.load(folder, NULL).generate("a fox", steps=1).images.any()
