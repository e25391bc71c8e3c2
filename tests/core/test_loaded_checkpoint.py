"""A checkpoint goes to a vendor that takes it whole, and its images come as any others do."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import sdkit_dispatch.api as api
from checkpoint_files import entry, safetensors_bytes
from fake_pipeline import SPEC
from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.cli import app
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect import host
from sdkit_dispatch.diffusion.image import FACTS_KEY
from sdkit_dispatch.diffusion.noise import MAX_SEED
from sdkit_dispatch.errors import (
    CancelledByUser,
    ConfigError,
    NoVendorError,
    PipelineError,
    RunError,
    WorkerError,
)
from sdkit_dispatch.failures import Failures
from sdkit_dispatch.plan import make_plans
from toy_pipeline import make_toy_pipeline

SIZE = {"width_px": 16, "height_px": 8}


@pytest.fixture(scope="module", autouse=True)
def fake_vendor():
    """The fake is among the vendors, and the only one that takes checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        real = api.find_vendors
        patch.setattr(
            api,
            "find_vendors",
            lambda: {**{n: s for n, s in real().items() if s.takes == "onnx"}, SPEC.name: SPEC},
        )
        yield


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory, fake_vendor):
    with Dispatcher(home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes())
    return path


def with_options(loaded, *options):
    """A ladder of the fake vendor with these options, one after the other."""
    plan = loaded.plans[0]
    loaded.plans = [
        plan.__class__(
            vendor=plan.vendor,
            device=plan.device,
            precision="fp32",
            runtime=plan.runtime,
            options=one,
        )
        for one in options
    ]
    return loaded


def test_a_checkpoint_is_drawn_by_the_vendor_that_takes_it_without_being_named(
    dispatcher, checkpoint
):
    answer = dispatcher.load(checkpoint).generate("a fox", steps=2, seed=4, batch=2, **SIZE)
    assert answer.plan.vendor == "fake-pipeline"
    assert answer.images.shape == (2, 8, 16, 3)
    assert answer.seeds == (4, 5)
    assert answer.denoiser["device"] == answer.plan.device.name
    assert (answer.images[1] == (answer.images[0].astype(int) + 1) % 256).all()


def test_its_facts_say_that_nothing_was_checked_and_why(dispatcher, checkpoint):
    answer = dispatcher.load(checkpoint).generate("a fox", steps=1, **SIZE)
    facts = json.loads(json.dumps(answer.facts()))
    assert facts["verdicts"] == {"the whole checkpoint": "unchecked"}
    assert "reference" in facts["unchecked"]["the whole checkpoint"]
    assert facts["engines"] == {}
    assert facts["checkpoint"]["file"] == "model.safetensors"
    assert len(facts["checkpoint"]["sha256"]) == 64
    assert answer.unchecked == facts["unchecked"]


def test_its_precision_is_what_ran_and_not_what_was_guessed(dispatcher, checkpoint):
    loaded = with_options(dispatcher.load(checkpoint), {"precision": "fp16"})
    answer = loaded.generate("a fox", steps=1, **SIZE)
    assert answer.facts()["precision"] == "fp16"


def test_its_own_size_is_drawn_unless_another_is_asked_for(dispatcher, checkpoint):
    request = dispatcher.load(checkpoint).make_request(prompt="a fox")
    assert (request.width_px, request.height_px) == (512, 512)


def test_it_stays_loaded_until_the_file_changes(dispatcher, checkpoint):
    first = dispatcher.load(checkpoint).generate("a fox", steps=1, **SIZE)
    again = dispatcher.load(checkpoint).generate("a fox", steps=1, **SIZE)
    assert again.denoiser["loaded"] == first.denoiser["loaded"]
    checkpoint.write_bytes(safetensors_bytes({"a": entry()}))
    changed = dispatcher.load(checkpoint).generate("a fox", steps=1, **SIZE)
    assert changed.denoiser["loaded"] != first.denoiser["loaded"]
    assert (changed.images != first.images).any()
    assert changed.facts()["checkpoint"] != first.facts()["checkpoint"]


def test_a_file_that_is_damaged_later_never_reaches_the_engine(dispatcher, checkpoint):
    loaded = dispatcher.load(checkpoint)
    loaded.generate("a fox", steps=1, **SIZE)
    checkpoint.write_bytes(b"anything else, of which the loader of an engine may die")
    with pytest.raises(PipelineError, match="neither"):
        loaded.generate("a fox", steps=1, **SIZE)


def test_a_file_that_changes_while_it_draws_gives_no_picture(dispatcher, checkpoint):
    loaded = dispatcher.load(checkpoint)

    def change(progress):
        if progress.phase == "denoise" and checkpoint.stat().st_size == len(safetensors_bytes()):
            checkpoint.write_bytes(safetensors_bytes({"a": entry()}) + b"")

    loaded.report = change
    with pytest.raises(PipelineError, match="was changed"):
        loaded.generate("a fox", steps=2, **SIZE)


def test_steps_are_reported_and_a_cancelled_one_stops(dispatcher, checkpoint):
    seen = []

    def report(progress):
        seen.append(progress.phase)
        if len(seen) > 20:
            raise CancelledByUser

    loaded = dispatcher.load(checkpoint)
    loaded.report = report
    with pytest.raises(CancelledByUser):
        loaded.generate("wait", steps=2, **SIZE)
    assert "denoise" in seen


def test_a_checkpoint_that_ended_the_worker_is_not_tried_again_unless_asked(dispatcher, checkpoint):
    checkpoint.write_bytes(safetensors_bytes({"deadly": entry()}))
    size, other = {"width_px": 8, "height_px": 16}, {"width_px": 8, "height_px": 8}
    with pytest.raises(WorkerError, match="died"):
        dispatcher.load(checkpoint).generate("abort", steps=1, **size)
    again = dispatcher.load(checkpoint)
    with pytest.raises(WorkerError, match="not tried again") as caught:
        again.generate("a fox", steps=1, **size)
    assert "--retry" in caught.value.hint
    assert again.generate("a fox", steps=1, **other).steps == ()  # another size may well fit
    retried = dispatcher.load(checkpoint, Choice(may_retry=True))
    assert retried.generate("a fox", steps=1, **size).steps == ()
    assert again.generate("a fox", steps=1, **size).steps == ()


def test_a_remembered_failure_of_a_checkpoint_takes_the_next_step_at_once(dispatcher, checkpoint):
    checkpoint.write_bytes(safetensors_bytes({"deadly too": entry()}))
    options = {"fault": "abort"}, {}
    first = with_options(dispatcher.load(checkpoint), *options).generate("a", steps=1, **SIZE)
    again = with_options(dispatcher.load(checkpoint), *options).generate("a", steps=1, **SIZE)
    assert [step.kind for step in (*first.steps, *again.steps)] == ["WorkerError"] * 2
    assert "not tried again" in again.steps[0].reason
    (failure,) = (
        one
        for one in Failures(dispatcher.home).all()
        if one.graph_digest == again.checkpoint["sha256"]
    )
    assert (failure.vendor, failure.component) == ("fake-pipeline", "the whole checkpoint")


def test_strict_refuses_what_cannot_be_checked_unless_no_check_is_asked_for(tmp_path, checkpoint):
    with Dispatcher(home=tmp_path / "home", config=Config(strict=True)) as strict:
        for run in (strict.load, strict.build):
            with pytest.raises(ConfigError, match="strict.*cannot be checked") as caught:
                run(checkpoint)
            assert "--no-check" in caught.value.hint
        answer = strict.load(checkpoint, Choice(must_check=False)).generate("a", steps=1, **SIZE)
    assert "unchecked" in answer.facts()["verdicts"].values()


def test_images_of_another_size_are_no_answer(dispatcher, checkpoint):
    with pytest.raises(RunError, match="asked for uint8"):
        dispatcher.load(checkpoint).generate("wrong size", steps=1, **SIZE)


def test_a_device_that_fails_takes_the_next_step_and_says_why(dispatcher, checkpoint):
    loaded = with_options(dispatcher.load(checkpoint), {"fault": "load"}, {})
    answer = loaded.generate("a fox", steps=1, **SIZE)
    assert [step.kind for step in answer.steps] == ["RunError"]
    assert answer.facts()["steps"][0]["vendor"] == "fake-pipeline"


def test_strict_raises_the_first_failure(dispatcher, checkpoint):
    loaded = with_options(dispatcher.load(checkpoint), {"fault": "load"}, {})
    loaded.is_strict = True
    with pytest.raises(RunError, match="does not open"):
        loaded.generate("a fox", steps=1, **SIZE)


def test_a_model_that_the_engine_does_not_know_is_the_users_to_mend(dispatcher, checkpoint):
    loaded = with_options(dispatcher.load(checkpoint), {"fault": "unknown"}, {})
    with pytest.raises(PipelineError, match="unknown"):
        loaded.generate("a fox", steps=1, **SIZE)


def test_what_the_engine_lacks_is_a_config_error(dispatcher, checkpoint):
    with pytest.raises(ConfigError, match="scheduler is not there"):
        dispatcher.load(checkpoint).generate("lacks it", steps=1, **SIZE)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"latents": np.zeros(1)}, "noise"),
        ({"scheduler": "x"}, "unknown"),
        ({"seed": -1}, "seed -1 with a batch of 1"),
        ({"seed": MAX_SEED + 1}, f"outside 0..{MAX_SEED}"),
        ({"seed": MAX_SEED, "batch": 2}, "with a batch of 2"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(dispatcher, checkpoint, values, words):
    with pytest.raises(ConfigError, match=words):
        dispatcher.load(checkpoint).generate("a fox", **{**SIZE, **values})


def test_another_vendor_refuses_a_checkpoint_and_names_the_one_that_takes_it(
    dispatcher, checkpoint
):
    with pytest.raises(PipelineError, match="fake-pipeline takes it") as caught:
        dispatcher.load(checkpoint, Choice(vendor="null"))
    assert caught.value.hint == "--vendor fake-pipeline"


def test_a_damaged_checkpoint_is_told_before_which_vendor_takes_it(dispatcher, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(length=10**6))
    for choice in (Choice(), Choice(vendor="null"), Choice(vendor="fake-pipeline")):
        with pytest.raises(PipelineError, match="header of 1000000"):
            dispatcher.load(path, choice)


def test_a_vendor_of_checkpoints_refuses_a_folder(dispatcher, tmp_path):
    folder = make_toy_pipeline(tmp_path / "pipeline")
    with pytest.raises(PipelineError, match="is a folder"):
        dispatcher.load(folder, Choice(vendor="fake-pipeline"))
    with pytest.raises(PipelineError, match="cannot be read"):
        dispatcher.load(tmp_path / "none", Choice(vendor="fake-pipeline"))


def test_it_is_never_planned_for_a_pipeline_of_components(dispatcher):
    def never(*asked):
        raise AssertionError(f"nothing is installed: {asked}")

    decision = make_plans(dispatcher.devices, host(), list(dispatcher.specs.values()), probe=never)
    assert decision.plans
    assert all(plan.vendor != SPEC.name for plan in decision.plans)


def test_the_command_line_builds_nothing_and_draws(tmp_path, checkpoint):
    out = tmp_path / "x.png"
    home = ["--home", str(tmp_path / "home")]
    run = CliRunner()
    built = run.invoke(app, [*home, "build", str(checkpoint), "--vendor", "fake-pipeline"])
    assert built.exit_code == 0, built.output
    assert "nothing to build: fake-pipeline takes the checkpoint as it is" in built.stdout
    drawn = run.invoke(
        app,
        [*home, "generate", "a fox", "-p", str(checkpoint), "--vendor", "fake-pipeline"]
        + ["--width", "16", "--height", "8", "--steps", "1", "--out", str(out)],
    )
    assert drawn.exit_code == 0, drawn.output
    assert "is unchecked" in drawn.stderr
    with Image.open(out) as image:
        assert image.size == (16, 8)
        told = json.loads(image.text[FACTS_KEY])
    assert told["verdicts"] == {"the whole checkpoint": "unchecked"}


def test_require_gpu_never_draws_a_checkpoint_on_the_cpu(tmp_path, checkpoint, fake_vendor):
    cpu = Device(id="cpu", kind="cpu", maker="unknown", name="a processor")
    card = Device(id="pci:0000:01:00.0", kind="discrete", maker="nvidia", name="a card")
    choice = Choice(must_use_gpu=True)
    with Dispatcher(home=tmp_path / "home") as lone:
        lone._devices = [cpu]
        for run in (lone.load, lone.build):
            with pytest.raises(NoVendorError, match="--require-gpu forbids a processor"):
                run(checkpoint, choice)
        lone._devices = [card, cpu]
        loaded = lone.load(checkpoint, choice)
        assert [plan.device for plan in loaded.plans] == [card]
        with pytest.raises(NoVendorError, match="--require-gpu forbids the CPU"):
            with_options(loaded, {"fault": "load"}).generate("a fox", steps=1, **SIZE)
