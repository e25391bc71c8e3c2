"""The denoising loop over sessions that compute something simple in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdkit_dispatch.contract import GenerateRequest, Progress, TensorSpec
from sdkit_dispatch.diffusion.pipeline import KEPT_PROMPTS, DiffusionPipeline
from sdkit_dispatch.errors import (
    CancelledByUser,
    ConfigError,
    NumericError,
    PipelineError,
    RunError,
)
from sdkit_dispatch.pipeline_files import GraphTensor, Pipeline, read_pipeline

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "models" / "pipelines"
HIDDEN = {"text_encoder": 16, "text_encoder_2": 24}

Feeds = Mapping[str, Any]


class MockSession:
    """A graph of a few lines of numpy. `dtypes` are what it declares for its inputs."""

    def __init__(
        self,
        component: str,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        break_with: Mapping[str, Any],
    ) -> None:
        self.component = component
        defaults = {"input_ids": "int64"}
        self.inputs = tuple(
            TensorSpec(
                name=name, dtype=dtypes.get(name, defaults.get(name, "float32")), shape=shape
            )
            for name, shape in shapes.items()
        )
        names = list(self._compute({spec.name: np.ones(spec.shape) for spec in self.inputs}))
        self.outputs = tuple(TensorSpec(name=n, dtype="float32", shape=()) for n in names)
        self.facts = {"device": "mock", "precision": "fp32"}
        self.calls: list[Feeds] = []
        self.closed = 0
        self.break_with = break_with

    def run(self, feeds: Feeds) -> dict[str, Any]:
        assert self.closed == 0, "run after close"
        self.calls.append(dict(feeds))
        for spec in self.inputs:
            assert feeds[spec.name].dtype == spec.dtype, spec
            assert feeds[spec.name].shape == spec.shape, spec
        outputs = self._compute(feeds)
        if self.component in self.break_with:
            call, value = self.break_with[self.component]
            if len(self.calls) == call:
                outputs = {name: np.full_like(array, value) for name, array in outputs.items()}
        return outputs

    def close(self) -> None:
        self.closed += 1

    def _compute(self, feeds: Feeds) -> dict[str, Any]:
        if self.component in HIDDEN:
            ids = feeds["input_ids"].astype(np.float32)
            width = HIDDEN[self.component]
            hidden = np.sin(ids[..., None] * (1 + np.arange(width, dtype=np.float32)) / 7)
            found = {"last_hidden_state": hidden}
            found |= {f"hidden_states.{i}": hidden * (i + 1) for i in range(4)}
            if self.component == "text_encoder_2":
                found = {"text_embeds": hidden.mean(axis=1), **found}
            return found
        if self.component == "unet":
            sample = feeds["sample"].astype(np.float32)
            hidden = feeds["encoder_hidden_states"].astype(np.float32)
            shift = hidden.mean(axis=(1, 2)).reshape(-1, 1, 1, 1)
            if "text_embeds" in feeds:
                shift = shift + feeds["text_embeds"].mean(axis=1).reshape(-1, 1, 1, 1)
            return {"out_sample": np.tanh(sample) * np.float32(0.5) + shift}
        latents = feeds["latent_sample"].astype(np.float32)
        pixels = np.repeat(np.repeat(latents[:, :3], 4, axis=2), 4, axis=3)
        return {"sample": np.tanh(pixels)}


class Bench:
    """A pipeline over mock sessions, and every session it opened."""

    def __init__(self, family: str = "sd15", **changes: Any) -> None:  # Any: see below
        self.dtypes: Mapping[str, str] = changes.pop("dtypes", {})
        self.break_with: Mapping[str, Any] = changes.pop("break_with", {})
        configs: Mapping[str, Mapping[str, Any]] = changes.pop("configs", {})
        pipeline: Pipeline = read_pipeline(TINY / f"{family}-optimum")
        merged = {name: {**values} for name, values in pipeline.configs.items()}
        for name, values in configs.items():
            merged[name].update(values)
        self.opened: list[MockSession] = []
        self.pipeline = DiffusionPipeline(replace(pipeline, configs=merged), self._open, **changes)

    def _open(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> MockSession:
        session = MockSession(component, shapes, self.dtypes, self.break_with)
        self.opened.append(session)
        return session

    def last(self, component: str) -> MockSession:
        return [session for session in self.opened if session.component == component][-1]

    def generate(self, **fields: Any) -> Any:
        return self.pipeline.generate(request(**fields), ignore)


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "prompt": "a cat",
        "width_px": 32,
        "height_px": 24,
        "steps": 4,
        "guidance": 5.0,
        "seed": 3,
        **changes,
    }
    return GenerateRequest(**fields)


def ignore(_progress: Progress) -> None:
    pass


def test_result_has_an_image_and_a_seed_for_each_of_the_batch() -> None:
    result = Bench().generate(batch=3)
    assert result.images.shape == (3, 24, 32, 3)
    assert result.images.dtype == np.uint8
    assert result.latents.shape == (3, 4, 6, 8)
    assert result.latents.dtype == np.float32
    assert result.seeds == (3, 4, 5)
    assert set(result.timings) == {"open", "encode", "denoise", "decode"}
    assert all(seconds >= 0 for seconds in result.timings.values())
    assert result.facts["unet"] == {"device": "mock", "precision": "fp32"}


@pytest.mark.parametrize("scheduler", ["dpmpp_2m", "euler_a", "lcm"])
def test_image_depends_on_its_seed_and_not_on_its_batch(scheduler: str) -> None:
    bench = Bench()
    batch = bench.generate(batch=3, scheduler=scheduler)
    alone = bench.generate(seed=5, scheduler=scheduler)
    np.testing.assert_array_equal(batch.images[2], alone.images[0])
    assert (batch.images[0] != batch.images[2]).any()


def test_guidance_moves_away_from_the_negative_prompt() -> None:
    """The mock UNet adds the mean of the conditioning, so the guided output can be computed."""
    bench = Bench()
    bench.generate(steps=1, scheduler="euler", negative_prompt="a dog")
    feeds = bench.last("unet").calls[0]
    rows = [call["input_ids"] for call in bench.last("text_encoder").calls]
    assert len(rows) == 2
    positive, negative = (MockSession("text_encoder", {"input_ids": (1, 77)}, {}, {}).run(
        {"input_ids": row})["last_hidden_state"][0] for row in rows)  # fmt: skip
    np.testing.assert_array_equal(feeds["encoder_hidden_states"], np.stack([negative, positive]))
    np.testing.assert_array_equal(feeds["sample"][0], feeds["sample"][1])

    result = bench.generate(steps=1, scheduler="euler", negative_prompt="a dog", guidance=9.0)
    weak = bench.generate(steps=1, scheduler="euler", negative_prompt="a dog", guidance=2.0)
    # Euler's one step goes to x - sigma * output, and output grows by 7 * (positive - negative).
    difference = 7 * (positive.mean() - negative.mean())
    moved = (result.latents - weak.latents) / difference
    assert moved.std() < 1e-3 * abs(moved.mean())
    assert moved.mean() < 0


@pytest.mark.parametrize("guidance", [1.0, 0.0])
def test_without_guidance_the_negative_prompt_is_not_even_encoded(guidance: float) -> None:
    bench = Bench()
    bench.generate(guidance=guidance, negative_prompt="a dog", batch=2)
    assert len(bench.last("text_encoder").calls) == 1
    assert bench.last("unet").calls[0]["sample"].shape[0] == 2


def test_long_prompt_reaches_the_unet_whole() -> None:
    bench = Bench()
    bench.generate(prompt="x " * 100, negative_prompt="a dog")
    assert len(bench.last("text_encoder").calls) == 4
    assert bench.last("unet").calls[0]["encoder_hidden_states"].shape == (2, 154, 16)


def test_sdxl_is_fed_penultimate_states_pooled_text_and_size() -> None:
    bench = Bench("sdxl")
    bench.generate(negative_prompt="a dog", batch=2)
    feeds = bench.last("unet").calls[0]
    assert feeds["encoder_hidden_states"].shape == (4, 77, 40)
    ids = bench.last("text_encoder_2").calls[0]["input_ids"]
    outputs = MockSession("text_encoder_2", {"input_ids": (1, 77)}, {}, {}).run({"input_ids": ids})
    for row in (2, 3):
        np.testing.assert_array_equal(
            feeds["encoder_hidden_states"][row][:, 16:], outputs["hidden_states.2"][0]
        )
        np.testing.assert_array_equal(feeds["text_embeds"][row], outputs["text_embeds"][0])
    np.testing.assert_array_equal(feeds["time_ids"], [[24, 32, 0, 0, 24, 32]] * 4)


@pytest.mark.parametrize("force", [True, False])
def test_sdxl_takes_zeros_for_no_negative_prompt_if_its_file_says_so(force: bool) -> None:
    bench = Bench("sdxl", configs={"model_index": {"force_zeros_for_empty_prompt": force}})
    bench.generate(negative_prompt="")
    feeds = bench.last("unet").calls[0]
    assert (feeds["encoder_hidden_states"][0] == 0).all() == force
    assert (feeds["text_embeds"][0] == 0).all() == force
    assert (feeds["encoder_hidden_states"][1] != 0).any()


@pytest.mark.parametrize("timestep", ["float32", "float16", "int64", "int32"])
def test_feeds_take_the_dtypes_that_the_session_declares(timestep: str) -> None:
    plain = Bench().generate(scheduler="euler")
    bench = Bench(dtypes={"timestep": timestep, "sample": "float16", "input_ids": "int32"})
    result = bench.generate(scheduler="euler")
    # Eleven bits of float16 in the latents alone.
    np.testing.assert_allclose(result.latents, plain.latents, atol=0.05)
    whole = bench.last("unet").calls[1]["timestep"]
    assert whole.dtype == timestep
    assert whole == 501


def test_fractional_timestep_is_rounded_for_a_graph_that_takes_whole_ones() -> None:
    bench = Bench(
        dtypes={"timestep": "int64"}, configs={"scheduler": {"timestep_spacing": "linspace"}}
    )
    bench.generate(scheduler="euler", steps=3)
    assert [int(call["timestep"]) for call in bench.last("unet").calls] == [999, 500, 0]


def test_progress_runs_to_one_in_every_phase() -> None:
    bench = Bench()
    seen: list[Progress] = []
    bench.pipeline.generate(request(batch=2), seen.append)
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == ["encode", "denoise", "decode"]
    denoise = [progress.fraction for progress in seen if progress.phase == "denoise"]
    assert denoise == [0, 0.25, 0.5, 0.75, 1]
    assert [p.fraction for p in seen if p.phase == "decode"] == [0, 0.5, 1]


def test_cancelling_stops_at_the_next_step_and_leaves_the_pipeline_usable() -> None:
    bench = Bench()

    def cancel(progress: Progress) -> None:
        if progress.phase == "denoise" and progress.fraction == 0.5:
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        bench.pipeline.generate(request(), cancel)
    assert len(bench.last("unet").calls) == 2
    np.testing.assert_array_equal(bench.generate().images, Bench().generate().images)


def test_sessions_are_kept_for_the_next_call_and_opened_anew_for_another_size() -> None:
    bench = Bench()
    bench.generate()
    bench.generate(prompt="a dog", seed=8)
    assert [session.component for session in bench.opened] == [
        "text_encoder",
        "unet",
        "vae_decoder",
    ]
    bench.generate(width_px=64)
    assert [session.component for session in bench.opened[3:]] == ["unet", "vae_decoder"]
    assert [session.closed for session in bench.opened] == [0, 1, 1, 0, 0]


def test_nothing_is_opened_before_it_is_needed() -> None:
    bench = Bench()
    assert bench.opened == []
    with pytest.raises(ConfigError):
        bench.generate(scheduler="unheard-of")
    with pytest.raises(ConfigError):
        bench.generate(width_px=33)
    assert bench.opened == []


def test_phases_release_their_components_if_memory_is_short() -> None:
    bench = Bench("sdxl", keep_loaded=False)
    open_at: dict[str, tuple[str, ...]] = {}
    bench.pipeline.generate(
        request(), lambda progress: open_at.update({progress.phase: bench.pipeline.loaded})
    )
    assert open_at == {"encode": (), "denoise": ("unet",), "decode": ("vae_decoder",)}
    assert bench.pipeline.loaded == ()
    assert [session.closed for session in bench.opened] == [1, 1, 1, 1]
    np.testing.assert_array_equal(bench.generate().images, Bench("sdxl").generate().images)


def test_an_error_releases_its_phase_too_if_memory_is_short() -> None:
    bench = Bench(keep_loaded=False, break_with={"unet": (2, np.nan)})
    with pytest.raises(NumericError):
        bench.generate()
    assert bench.pipeline.loaded == ()
    assert [session.closed for session in bench.opened] == [1, 1]


def test_lcm_unet_is_fed_the_guidance_scale_as_an_embedding() -> None:
    pipeline = read_pipeline(TINY / "sd15-optimum")
    unet = pipeline.components["unet"]
    scale = GraphTensor(name="timestep_cond", dtype="float32", dims=("batch", 8))
    lcm = replace(
        pipeline,
        components={
            **pipeline.components,
            "unet": replace(unet, inputs=(*unet.inputs, scale)),
        },
        configs={
            **pipeline.configs,
            "unet": {**pipeline.configs["unet"], "time_cond_proj_dim": 8},
        },
    )
    opened: dict[str, MockSession] = {}

    def open_session(component: str, shapes: Mapping[str, tuple[int, ...]]) -> MockSession:
        return opened.setdefault(component, MockSession(component, shapes, {}, {}))

    DiffusionPipeline(lcm, open_session).generate(
        request(guidance=8.0, batch=2, scheduler="lcm", negative_prompt="a dog"), ignore
    )
    feeds = opened["unet"].calls[0]
    assert feeds["sample"].shape[0] == 2
    assert len(opened["text_encoder"].calls) == 1
    # Recorded from diffusers 0.42.1, whose float32 angles of up to 7000 lose the fifth digit.
    recorded = [0.506885, -0.97048, 0.586653, 0.644218, 0.862013, -0.241183, -0.809838, 0.764842]
    np.testing.assert_allclose(feeds["timestep_cond"], [recorded] * 2, atol=1e-4)


def test_close_and_release_close_each_session_once() -> None:
    bench = Bench()
    bench.generate()
    bench.pipeline.release("text_encoder", "text_encoder_2")
    assert bench.pipeline.loaded == ("unet", "vae_decoder")
    bench.pipeline.close()
    bench.pipeline.close()
    assert [session.closed for session in bench.opened] == [1, 1, 1]
    assert bench.generate().images.shape == (1, 24, 32, 3)


def test_decode_undoes_the_scaling_of_the_vae() -> None:
    config = {"scaling_factor": 0.5, "shift_factor": 0.25}
    bench = Bench(configs={"vae_decoder": config})
    result = bench.generate()
    fed = bench.last("vae_decoder").calls[0]["latent_sample"]
    np.testing.assert_allclose(fed, result.latents / 0.5 + 0.25, rtol=1e-6)


def test_decode_undoes_the_statistics_of_the_latents() -> None:
    mean, std = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    config = {"scaling_factor": 0.5, "latents_mean": mean, "latents_std": std}
    bench = Bench(configs={"vae_decoder": config})
    result = bench.generate()
    fed = bench.last("vae_decoder").calls[0]["latent_sample"][0]
    for channel in range(4):
        expected = result.latents[0, channel] / 0.5 * std[channel] + mean[channel]
        np.testing.assert_allclose(fed[channel], expected, rtol=1e-5, atol=1e-6)


def test_pixels_are_what_the_decoder_said() -> None:
    bench = Bench()
    result = bench.generate()
    fed = bench.last("vae_decoder").calls[0]["latent_sample"][0, :3]
    expected = np.rint((np.tanh(fed) * 0.5 + 0.5) * 255)
    np.testing.assert_array_equal(result.images[0, ::4, ::4].transpose(2, 0, 1), expected)


def test_given_noise_replaces_that_of_the_seed() -> None:
    bench = Bench()
    random = np.random.default_rng(0)
    start = random.standard_normal((1, 4, 6, 8)).astype(np.float32)
    noises = random.standard_normal((4, 1, 4, 6, 8)).astype(np.float32)
    first, second = (
        bench.pipeline.generate(
            request(scheduler="euler_a", seed=seed), ignore, latents=start, noises=list(noises)
        )
        for seed in (1, 2)
    )
    np.testing.assert_array_equal(first.latents, second.latents)
    other = bench.pipeline.generate(
        request(scheduler="euler_a"), ignore, latents=start, noises=list(-noises)
    )
    assert (other.latents != first.latents).any()


def test_latents_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 4, 8, 8\) do not fit the request"):
        Bench().pipeline.generate(
            request(), ignore, latents=np.zeros((1, 4, 8, 8), dtype=np.float32)
        )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_unet_that_overflows_is_reported_with_its_step(value: float) -> None:
    bench = Bench(break_with={"unet": (3, value)})
    with pytest.raises(NumericError, match=r"unet: output 'out_sample' has .* at step 3 of 4"):
        bench.generate()


def test_text_encoder_that_overflows_is_reported() -> None:
    with pytest.raises(NumericError, match="text_encoder: output 'last_hidden_state' has 1232 of"):
        Bench(break_with={"text_encoder": (1, np.nan)}).generate()


def test_latents_that_overflow_between_steps_are_reported() -> None:
    bench = Bench(break_with={"unet": (2, 3e38)})
    with pytest.raises(NumericError, match="the latents are not finite after step 2 of 4"):
        bench.generate(guidance=1.0, scheduler="euler")


@pytest.mark.parametrize("level", [0.0, -0.3])
def test_flat_image_is_an_error_and_not_a_picture(level: float) -> None:
    bench = Bench(break_with={"vae_decoder": (2, level)})
    with pytest.raises(NumericError, match=r"one flat colour .* for image 2 of 3"):
        bench.generate(batch=3)


def test_sdxl_text_encoder_without_hidden_states_is_named() -> None:
    class Short(MockSession):
        def _compute(self, feeds: Feeds) -> dict[str, Any]:
            found = super()._compute(feeds)
            return {key: array for key, array in found.items() if "hidden_states" not in key}

    pipeline = DiffusionPipeline(
        read_pipeline(TINY / "sdxl-optimum"), lambda name, shapes: Short(name, shapes, {}, {})
    )
    with pytest.raises(PipelineError, match=r"text_encoder: SDXL needs outputs hidden_states\.0"):
        pipeline.generate(request(), ignore)


def test_session_of_another_shape_is_a_run_error() -> None:
    pipeline = DiffusionPipeline(
        read_pipeline(TINY / "sd15-optimum"),
        lambda name, shapes: MockSession(
            name, {**shapes, **({"sample": (2, 4, 9, 9)} if name == "unet" else {})}, {}, {}
        ),
    )
    with pytest.raises(RunError, match=r"'sample' was built for \(2, 4, 9, 9\)"):
        pipeline.generate(request(), ignore)


@pytest.mark.parametrize("keep_loaded", [True, False])
def test_a_prompt_is_encoded_once_for_requests_with_other_seeds(keep_loaded: bool) -> None:
    bench, fresh = Bench(keep_loaded=keep_loaded), Bench()
    first = bench.generate(prompt="a fox", negative_prompt="blurred", seed=1)
    again = bench.generate(prompt="a fox", negative_prompt="blurred", seed=2)
    encoders = [one for one in bench.opened if one.component == "text_encoder"]
    assert [len(one.calls) for one in encoders] == [2]
    expected = fresh.generate(prompt="a fox", negative_prompt="blurred", seed=2)
    assert (again.latents == expected.latents).all()
    assert again.facts == first.facts
    bench.generate(prompt="a wolf", negative_prompt="blurred")
    encoders = [one for one in bench.opened if one.component == "text_encoder"]
    assert sum(len(one.calls) for one in encoders) == 3


def test_what_another_text_encoder_said_is_forgotten_when_it_is_released() -> None:
    bench = Bench()
    bench.generate(prompt="a fox", guidance=1.0)
    bench.pipeline.release("unet")
    bench.generate(prompt="a fox", guidance=1.0)
    assert len(bench.last("text_encoder").calls) == 1
    bench.pipeline.release("text_encoder")
    bench.generate(prompt="a fox", guidance=1.0)
    encoders = [one for one in bench.opened if one.component == "text_encoder"]
    assert [len(one.calls) for one in encoders] == [1, 1]


def test_few_prompts_are_kept() -> None:
    bench = Bench()
    for number in (*range(KEPT_PROMPTS + 1), 0):
        bench.generate(prompt=f"fox {number}", guidance=1.0)
    assert len(bench.last("text_encoder").calls) == KEPT_PROMPTS + 2
