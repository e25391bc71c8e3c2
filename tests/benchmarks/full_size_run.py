"""One engine's measurement of full-size Stable Diffusion 1.5; started by `ggml_speed.py`.

    python full_size_run.py ENGINE '{"threads": 2, ...}'

It runs in the engine's own environment, so it imports nothing but numpy and the engine. The last
line that it prints is JSON: CPU seconds of all threads of one UNet step (512 x 512, batch 1, after
one that is not counted) and of decoding one 512 x 512 picture, and what computing needs of memory.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPONENTS = ("unet", "vae_decoder")
PIXELS = 512
STEPS = 2
"""The first also pays for what is allocated and read on first use."""
BUFFER = re.compile(r"(unet|vae) compute buffer size: ([\d.]+) MB")


def feeds(component: str) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    latent = rng.standard_normal((1, 4, PIXELS // 8, PIXELS // 8)).astype(np.float32)
    if component == "vae_decoder":
        return {"latent_sample": latent}
    states = rng.standard_normal((1, 77, 768)).astype(np.float32)
    return {
        "sample": latent,
        "timestep": np.array(500, np.float32),
        "encoder_hidden_states": states,
    }


def cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def ggml_adapter(threads: int) -> tuple[Any, Any]:
    from sdkit_dispatch.contract import Device
    from sdkit_ggml.adapter import GgmlAdapter

    adapter = GgmlAdapter()
    adapter.threads = threads
    device = Device(id="cpu", kind="cpu", maker="", name="the processor")
    return adapter, device


def compile_ggml(*, onnx: str, engines: str, threads: int) -> dict[str, Any]:
    """Compiles both components under `engines`."""
    from sdkit_dispatch.contract import BuildRequest, record_to_json

    adapter, device = ggml_adapter(threads)
    plan = adapter.plan(device, "fp32", {})
    took = {}
    for component in COMPONENTS:
        request = BuildRequest(
            vendor="ggml",
            revision=0,
            runtime=plan.runtime,
            target=plan.target,
            component=component,
            graph_digest="",
            weights_digest="",
            precision="fp32",
            shapes={name: tuple(value.shape) for name, value in feeds(component).items()},
            options=plan.options,
        )
        out, model = Path(engines) / component, Path(onnx) / component / "model.onnx"
        out.mkdir(parents=True)
        took[component] = cpu_s(
            lambda r=request, m=model, o=out: adapter.compile(  # type: ignore[misc]
                r, m, o, device=device, report=lambda progress: None
            )
        )
        (Path(engines) / f"{component}.json").write_text(json.dumps(record_to_json(request)))
    return took


def run_ggml(*, onnx: str, engines: str, threads: int) -> dict[str, Any]:
    from sdkit_dispatch.contract import BuildRequest, Engine, record_from_json

    adapter, device = ggml_adapter(threads)
    done: dict[str, Any] = {"buffer_mib": {}}
    for component in COMPONENTS:
        told = json.loads((Path(engines) / f"{component}.json").read_text())
        engine = Engine(
            key="",
            request=record_from_json(BuildRequest, told),
            folder=str(Path(engines) / component),
            onnx=str(Path(onnx) / component / "model.onnx"),
        )
        session, fed = adapter.load(engine, device), feeds(component)
        if component == "unet":
            session.run(fed)
        done[component] = cpu_s(lambda s=session, f=fed: s.run(f))  # type: ignore[misc]
        done["buffer_mib"][component] = int(session.facts["arena_bytes"]) / (1 << 20)
        done["what"] = session.facts["runtime"]
        session.close()
    return done


def run_onnxruntime(*, onnx: str, threads: int) -> dict[str, Any]:
    import onnxruntime

    done: dict[str, Any] = {"what": f"onnxruntime {onnxruntime.__version__}", "buffer_mib": {}}
    for component in COMPONENTS:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(Path(onnx) / component / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        fed = feeds(component)
        if component == "unet":
            session.run(None, fed)
        done[component] = cpu_s(lambda s=session, f=fed: s.run(None, f))  # type: ignore[misc]
        del session
    return done


class Watch:
    """Notes the CPU time whenever stable-diffusion.cpp says where it is."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.sampled = self.decoded = 0.0
        self.buffer_mib: dict[str, float] = {}

    def step(self, step: int, steps: int, *_: object) -> None:
        # It also tells of loading and of tiles, which have other numbers of steps.
        if steps == STEPS and not self.sampled:
            self.steps.append(time.process_time())

    def log(self, text: str) -> None:
        now = time.process_time()
        if "sampling completed" in text:
            self.sampled = now
        elif "decode_first_stage completed" in text:
            self.decoded = now
        elif found := BUFFER.search(text):
            name = "unet" if found[1] == "unet" else "vae_decoder"
            self.buffer_mib[name] = max(float(found[2]), self.buffer_mib.get(name, 0))

    def result(self, what: str) -> dict[str, Any]:
        if len(self.steps) < STEPS or not self.decoded:
            raise SystemExit(f"{what}: told {len(self.steps)} of {STEPS} steps, or no decoding")
        return {
            "what": what,
            "unet": self.steps[-1] - self.steps[-2],
            "vae_decoder": self.decoded - self.sampled,
            "buffer_mib": self.buffer_mib,
        }


def run_cyllama(*, checkpoint: str, threads: int, direct: bool) -> dict[str, Any]:
    import importlib.metadata

    from cyllama.sd import stable_diffusion as sd

    watch = Watch()
    sd.set_progress_callback(watch.step)
    sd.set_log_callback(lambda level, text: watch.log(text))
    params = sd.SDContextParams(model_path=checkpoint, n_threads=threads, wtype=sd.SDType.F32)
    params.diffusion_flash_attn = params.flash_attn = True
    params.diffusion_conv_direct = params.vae_conv_direct = direct
    sd.SDContext(params).generate(
        "a cat",
        width=PIXELS,
        height=PIXELS,
        sample_steps=STEPS,
        cfg_scale=1.0,
        seed=1,
        sample_method=sd.SampleMethod.EULER,
        scheduler=sd.Scheduler.DISCRETE,
    )
    return watch.result(f"cyllama {importlib.metadata.version('cyllama')}")


def run_stable_diffusion_cpp_python(
    *, checkpoint: str, threads: int, direct: bool
) -> dict[str, Any]:
    import ctypes

    import stable_diffusion_cpp as sd

    watch = Watch()
    model = sd.StableDiffusion(
        model_path=checkpoint,
        n_threads=threads,
        wtype="f32",
        vae_decode_only=True,
        flash_attn=True,
        diffusion_flash_attn=True,
        diffusion_conv_direct=direct,
        vae_conv_direct=direct,
    )
    log = sd.sd_log_callback(lambda level, text, data: watch.log(text.decode(errors="replace")))
    sd.sd_set_log_callback(log, ctypes.c_void_p(0))
    model.generate_image(
        "a cat",
        width=PIXELS,
        height=PIXELS,
        sample_steps=STEPS,
        cfg_scale=1.0,
        seed=1,
        sample_method="euler",
        scheduler="discrete",
        progress_callback=watch.step,
    )
    return watch.result(f"stable-diffusion-cpp-python {sd.__version__}")


ENGINES: dict[str, Callable[..., dict[str, Any]]] = {
    "compile-ggml": compile_ggml,
    "ggml": run_ggml,
    "onnxruntime": run_onnxruntime,
    "cyllama": run_cyllama,
    "stable-diffusion-cpp-python": run_stable_diffusion_cpp_python,
}


if __name__ == "__main__":
    answer = ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))
    print("\n" + json.dumps(answer), flush=True)
