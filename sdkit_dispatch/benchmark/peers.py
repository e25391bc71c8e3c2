"""Other people's runtimes as rows, each in an environment of its own.

A peer is one script in `peer_scripts/`, which imports nothing of ours and speaks JSON lines:
a job comes in first, then commands, and every command has one line of answer. See
`peer_scripts/README.md`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from sdkit_dispatch.benchmark.entrants import Image, Use, feeds_of, relative_errors, with_peak
from sdkit_dispatch.benchmark.machine import drop_from_memory, peak_rss_bytes
from sdkit_dispatch.benchmark.peer_checkpoint import checkpoint_for
from sdkit_dispatch.benchmark.records import Row
from sdkit_dispatch.contract import Progress, Rejection, VendorSpec, record_from_json
from sdkit_dispatch.diffusion.noise import image_seeds, start_noise
from sdkit_dispatch.diffusion.shapes import latent_shape
from sdkit_dispatch.env import Environment, install, plan_install, resolve
from sdkit_dispatch.errors import ConfigError, RunError, VendorEnvError, WorkerError
from sdkit_dispatch.wanted import Wanted
from sdkit_dispatch.worker_client import Timing

if TYPE_CHECKING:
    from sdkit_dispatch.api import Dispatcher
    from sdkit_dispatch.choice import Choice

SCRIPTS = Path(__file__).parents[1] / "peer_scripts"
LAST_WORDS = 3
"""Lines of a peer's log that are shown when it dies."""
LIMIT_S = 3600.0
"""No command of a peer may take longer; converting and compiling a large model is one."""
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """A peer.

    Attributes:
        extra: Of our distribution: what its environment holds. Empty: it cannot be installed.
        packages: What must be there for it to run; the first one's version is shown.
        absent: Why there is no way to run it; empty if there is.
        script: In `peer_scripts`; the peer's name by default.
        mode: Handed to the script.
        takes_checkpoint: It reads a whole checkpoint instead of the folder.
    """

    name: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    absent: str = ""
    script: str = ""
    mode: str = ""
    takes_checkpoint: bool = False

    @property
    def vendor(self) -> VendorSpec:
        """What the machinery of environments knows it by."""
        return VendorSpec(
            name=f"peer-{self.extra.removeprefix('peer-')}",
            extra=self.extra,
            adapter="",
            device_kinds=("cpu",),
            revision=1,
            runtime_packages=self.packages,
        )


PEERS = {
    peer.name: peer
    for peer in (
        PeerSpec(
            name="openvino-genai",
            extra="peer-openvino-genai",
            packages=("openvino-genai", "openvino-tokenizers", "transformers"),
            script="openvino_genai_images",
        ),
        PeerSpec(
            name="onnxruntime",
            extra="cpu",
            packages=("onnxruntime",),
            script="onnxruntime_plain",
        ),
        PeerSpec(
            name="diffusers",
            extra="peer-diffusers",
            packages=("diffusers", "torch", "transformers"),
            script="diffusers_torch",
            mode="eager",
        ),
        PeerSpec(
            name="diffusers-compiled",
            extra="peer-diffusers",
            packages=("diffusers", "torch", "transformers"),
            script="diffusers_torch",
            mode="compiled",
        ),
        PeerSpec(
            name="optimum-onnx",
            extra="peer-optimum-onnx",
            packages=("optimum-onnx", "diffusers", "torch", "onnxruntime"),
            script="optimum_onnx",
        ),
        PeerSpec(
            name="stable-diffusion.cpp",
            extra="sdcpp",
            packages=("cyllama-vulkan",),
            script="sdcpp_checkpoint",
            takes_checkpoint=True,
        ),
        PeerSpec(
            name="tvm",
            extra="peer-tvm",
            packages=("apache-tvm", "onnxruntime"),
            script="tvm_relax",
        ),
        PeerSpec(
            name="jax-xla",
            extra="peer-jax",
            packages=("jax", "jaxonnxruntime"),
            script="jax_xla",
        ),
        PeerSpec(name="max", extra="peer-max", packages=("modular",), script="max_engine"),
        PeerSpec(
            name="polyblocks",
            absent="there is no public package of it: the name on PyPI is another project's",
        ),
    )
}


def peer_entrants(
    dispatcher: Dispatcher,
    choice: Choice,
    *,
    want: Wanted,
    names: Sequence[str],
    checkpoint: Path | None = None,
) -> tuple[list[PeerEntrant], list[Row]]:
    """Returns the peers that can run here, and rows with reasons for the others.

    Args:
        dispatcher: Whose home has their environments.
        choice: What is measured.
        want: The same.
        names: Of peers, or ("all",).
        checkpoint: Of the same network as the pipeline, for peers that take one.

    Raises:
        ConfigError: A name is unknown.
    """
    chosen = list(PEERS) if ALL in names else list(names)
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise ConfigError(
            f"there is no peer '{unknown[0]}'; there are {', '.join(PEERS)}",
            f"--peers {next(iter(PEERS))}",
        )
    entrants, missing = [], []
    for name in chosen:
        peer = PEERS[name]
        found = _environment(dispatcher, peer)
        weights = checkpoint_for(name, want.pipeline, checkpoint) if peer.takes_checkpoint else None
        no = next((one for one in (weights, found) if isinstance(one, Rejection)), None)
        if no is not None:
            missing.append(
                Row(name=name, kind="peer", failure=no.reason, hint=no.hint, device="cpu")
            )
            continue
        entrants.append(
            PeerEntrant(
                dispatcher=dispatcher,
                choice=choice,
                peer=peer,
                python=cast(Environment, found).python,
                want=want,
                checkpoint=cast("Path | None", weights),
            )
        )
    return entrants, missing


def takes_checkpoint(dispatcher: Dispatcher, names: Sequence[str]) -> bool:
    """Returns whether one of the peers takes a checkpoint and could run here if it had one."""
    chosen = PEERS if ALL in names else names
    peers = [PEERS[name] for name in chosen if name in PEERS and PEERS[name].takes_checkpoint]
    return any(isinstance(_environment(dispatcher, peer), Environment) for peer in peers)


def peer_files(home: Path) -> Path:
    """Returns where peers keep what they make of pipelines."""
    return home / "scratch" / "peers"


def install_peers(dispatcher: Dispatcher, names: Sequence[str]) -> None:
    """Makes the environments of peers that have none.

    Raises:
        VendorEnvError: One cannot be made.
    """
    for name in list(PEERS) if ALL in names else names:
        peer = PEERS.get(name)
        if peer is None or peer.absent or isinstance(_environment(dispatcher, peer), Environment):
            continue
        plan = plan_install(peer.vendor, home=dispatcher.home, report=dispatcher.report)
        dispatcher.report(Progress(phase=f"install {plan.summary}"))
        install(peer.vendor, home=dispatcher.home, report=dispatcher.report, plan=plan)


def peer_install_summaries(dispatcher: Dispatcher, names: Sequence[str]) -> list[str]:
    """Returns what installing the missing ones would fetch, a sentence for each.

    A peer whose packages cannot be found gets the reason instead.
    """
    summaries: dict[str, str] = {}
    for name in list(PEERS) if ALL in names else names:
        peer = PEERS.get(name)
        if peer is None or peer.absent or peer.extra in summaries:
            continue
        if isinstance(_environment(dispatcher, peer), Environment):
            continue
        try:
            plan = plan_install(peer.vendor, home=dispatcher.home, report=dispatcher.report)
            summaries[peer.extra] = plan.summary
        except VendorEnvError as error:
            summaries[peer.extra] = f"{peer.vendor.name}: {error.message}"
    return list(summaries.values())


def _environment(dispatcher: Dispatcher, peer: PeerSpec) -> Environment | Rejection:
    if peer.absent:
        return Rejection(vendor=peer.name, code="absent", reason=peer.absent)
    # A folder of environments per vendor that the user chose says nothing of peers.
    found = resolve(peer.vendor, choice="auto", home=dispatcher.home)
    if isinstance(found, Rejection):
        hint = f"sdkit-dispatch bench --peers {peer.name} --install"
        # Its own words name folders, and a report is made to be shown to others.
        reason = "it is not installed" if found.code == "not-installed" else found.reason
        return replace(found, reason=reason, hint=hint)
    return found


@dataclass(kw_only=True)
class PeerEntrant:
    """A peer: its script in a process of its own."""

    dispatcher: Dispatcher
    choice: Choice
    peer: PeerSpec
    python: Path
    want: Wanted
    checkpoint: Path | None = None
    components: tuple[str, ...] = ()
    makes_images: bool = False
    row: Row = field(init=False)
    _computes: bool = True
    _process: PeerProcess | None = None
    _work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.row = Row(name=self.peer.name, kind="peer", device="cpu")
        digest = self.want.digests["unet"]
        where = f"{digest[0][:12]}{digest[1][:12]}"
        self._work = peer_files(self.dispatcher.store.home) / self.peer.name / where

    def prepare(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        process = self._start()
        try:
            started_s = time.perf_counter()
            answer = process.ask("prepare")
            elapsed_s = time.perf_counter() - started_s
        finally:
            process.close()
        self.components = tuple(answer.get("components", ()))
        self.makes_images = bool(answer.get("images"))
        self._computes = bool(answer.get("computes", True))
        is_built = "bytes" in answer  # others take the graphs as they are
        self.row = replace(
            self.row,
            runtime=str(answer.get("runtime", "")),
            precision=str(answer.get("precision", "fp32")),
            note=str(answer.get("note", "")),
            built_now=not answer.get("was_there") if is_built else None,
            build_s=elapsed_s if is_built and not answer.get("was_there") else None,
            engine_bytes=answer.get("bytes"),
        )
        if not self.components and not self.makes_images:
            raise RunError(str(answer.get("failure", "it can run nothing of this pipeline")))

    def forget_files(self) -> bool:
        if self.checkpoint is not None:
            return drop_from_memory(self.checkpoint)
        return drop_from_memory(self._work) and drop_from_memory(self.want.pipeline.folder)

    def open(self, use: Use) -> None:
        self._process = self._start()
        ran = self._process.ask("open", use=use).get("ran", {})
        self.row = replace(self.row, ran={name: dict(facts) for name, facts in ran.items()})
        if use == "components" and self._computes and not self.row.error:
            self.row = replace(self.row, error=self._errors())

    def _errors(self) -> dict[str, float]:
        """Returns how far its components are off, on the inputs that engines are checked with."""
        recording = self.dispatcher.builder(self.choice).tools.reference.recording(
            self.want.pipeline,
            self.want.request,
            shapes=self.want.shapes,
            digests=self.want.digests,
            token_chunks=self.want.token_chunks,
            report=self.dispatcher.report,
        )
        if recording is None or self._process is None:
            return {}
        errors = {}
        with tempfile.TemporaryDirectory(prefix="sdkit-dispatch-") as name:
            folder = Path(name)
            for component in self.components:
                for case in recording.cases.get(component, ())[:1]:
                    np.savez(folder / "feeds.npz", **case.feeds)
                    self._process.ask(
                        "compute",
                        component=component,
                        feeds=str(folder / "feeds.npz"),
                        outputs=str(folder / "outputs.npz"),
                    )
                    with np.load(folder / "outputs.npz", allow_pickle=False) as outputs:
                        shared = {
                            key: value for key, value in case.outputs.items() if key in outputs
                        }
                        if shared:  # one with other weights names its outputs otherwise
                            errors[component] = relative_errors(outputs, shared)
        return errors

    def run(self, component: str, runs: int) -> Timing:
        assert self._process is not None
        return record_from_json(Timing, self._process.ask("run", component=component, runs=runs))

    def image(self) -> Image:
        assert self._process is not None
        answer = self._process.ask("image")
        pixels = answer.get("pixels")
        return Image(
            wall_s=float(answer["wall_s"]),
            cpu_s=float(answer["cpu_s"]),
            pixels=None if pixels is None else np.load(pixels, allow_pickle=False),
        )

    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        if self._process is not None:
            self.row = with_peak(self.row, peak_rss_bytes(self._process.pid))
            self._process.close()
            self._process = None

    def _start(self) -> PeerProcess:
        request, pipeline = self.want.request, self.want.pipeline
        seeds = image_seeds(request.seed, request.batch)
        noise = self._work / "noise.npy"
        np.save(noise, start_noise(seeds, latent_shape(pipeline, request)))
        feeds = {}
        for name, arrays in feeds_of(self.want).items():
            feeds[name] = str(self._work / f"{name}-feeds.npz")
            np.savez(feeds[name], **arrays)
        job = {
            "mode": self.peer.mode,
            "work": str(self._work),
            "pipeline": str(pipeline.folder.absolute()),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.absolute()),
            "threads": self.dispatcher.config.threads,
            "noise": str(noise),
            "request": {
                name: getattr(request, name)
                for name in ("prompt", "negative_prompt", "width_px", "height_px", "steps")
            }
            | {name: getattr(request, name) for name in ("guidance", "seed", "batch", "scheduler")},
            "components": {
                name: {
                    "onnx": str(pipeline.components[name].onnx.absolute()),
                    "shapes": {key: list(shape) for key, shape in shapes.items()},
                    "feeds": feeds[name],
                }
                for name, shapes in self.want.shapes.items()
            },
        }
        script = SCRIPTS / f"{self.peer.script}.py"
        return PeerProcess(self.peer.name, self.python, script, job)


class PeerProcess:
    """A peer's script at work. Close it."""

    def __init__(
        self, name: str, python: Path, script: Path, job: Mapping[str, Any]
    ) -> None:  # Any: JSON data
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            self._process = subprocess.Popen(
                [str(python), "-E", "-s", "-u", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONUTF8": "1", **_threads_environment(job["threads"])},
                # Ctrl-C is for us: we end it when it is time.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(
                f"the peer {name} cannot be started with {python}: {error}"
            ) from error
        self._send(job)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, command: str, **values: Any) -> dict[str, Any]:  # Any: JSON data
        """Sends a command and waits for its answer.

        Raises:
            RunError: The peer says why it cannot.
            WorkerError: It died, with its last words; or it took longer than `LIMIT_S`.
        """
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._send({"do": command, **values})
            line = cast(IO[str], self._process.stdout).readline()
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
        if not line and is_late:
            raise WorkerError(
                f"the peer {self._name} was stopped: '{command}' took longer than {LIMIT_S:g} s"
            )
        if not line:
            raise self._dead(command)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(str(answer["error"]))
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:  # Any: JSON data
        stream = cast(IO[str], self._process.stdin)
        with suppress(OSError):  # the missing answer tells
            stream.write(json.dumps(message) + "\n")
            stream.flush()

    def _dead(self, command: str) -> WorkerError:
        code = self._process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        words = "".join(f"\n    {line}" for line in lines[-LAST_WORDS:])
        return WorkerError(f"the peer {self._name} died in '{command}' ({cause}){words}")

    def close(self) -> None:
        """Ends the process, with all that it has started. Twice is fine."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _threads_environment(threads: int | None) -> dict[str, str]:
    """Returns what makes libraries without a setting of their own use as many threads."""
    if threads is None:
        return {}
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads))
