"""What errors of NVIDIA's libraries become, and what the driver says, table by table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdkit_dispatch.contract import Device, Problem
from sdkit_dispatch.errors import CompileError, UnsupportedOpError
from sdkit_dispatch.graph.size_ranges import Ranges
from sdkit_tensorrt import build_memory
from sdkit_tensorrt.build_memory import estimated_peak_bytes, machine_bytes
from sdkit_tensorrt.driver import Card, find_card
from sdkit_tensorrt.plan_header import differences, header_from_bytes
from sdkit_tensorrt.profiles import InputRange, free_shapes, profile_holding
from sdkit_tensorrt.refusals import BadNode, compile_error, parse_error
from tensorrt_stubs import StubCuda

CARD = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="nvidia",
    name="GeForce RTX 4090",
    arch="sm_89",
    pci_address="0000:01:00.0",
    driver="550.54",
)

WORDS = [
    # As TensorRT-RTX 1.7.1 and TensorRT 11.4 say it -> in our message, in our hint.
    (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:1500: run_passes] "
        "Cannot compile for target(s) sm75, because the model contains HW-specific datatypes: b16. "
        "In compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:2012)",
        "sm75 does not compute in b16",
        "fp16",
    ),
    (
        "Cannot compile for target(s) sm86, because the model contains HW-specific datatypes: "
        "fp8_e4m3.",
        "sm86 does not compute in fp8_e4m3",
        "newer card",
    ),
    (
        "Network has dynamic or shape inputs, but no optimization profile has been defined.",
        "no optimization profile says which",
        "profiles",
    ),
    (
        "Dynamic input tensor encoder_hidden_states is missing dimensions in profile 0.",
        'profile 0 says nothing of the input "encoder_hidden_states"',
        "every free size",
    ),
    ("dimensions in profile 0 for sample do not satisfy MIN<=OPT<=MAX", "do not rise", "largest"),
    ("tensor volume exceeds (2^31)-1, dimensions are [2,8,16384,16384]", "2^31", "smaller image"),
    (
        "Internal Error: MyelinCheckException: graph_jit.cpp:278: CHECK(status == CUDA_SUCCESS) "
        "failed.",
        "compiled on the card only",
        "without refit",
    ),
    (
        "Target SM 80 is not found in the accelerator list.",
        "compiled on the card only",
        "without refit",
    ),
    (
        "Unable to load library: libnvinfer_lean.so.1: libnvinfer_lean.so.1: cannot open shared "
        "object file",
        "lean runtime",
        "this version alone",
    ),
    (
        "IBuilder::buildSerializedNetwork: Error Code 1: Cuda Runtime (In generateForCurrent at "
        "/_src/runtime/core/cudaDeviceProfile.cpp:221 (cudaError 35: CUDA driver version is "
        "insufficient for CUDA runtime version))",
        "no NVIDIA driver here",
        "--for",
    ),
    (
        "createInferRuntime: Error Code 6: API Usage Error (CUDA initialization failure with "
        "error: 35 In checkCudaInstallation",
        "no NVIDIA driver here",
        "580",
    ),
    ("(cudaError 100: no CUDA-capable device is detected)", "finds no card", "nvidia-smi"),
    ("pybind11::init(): factory function returned nullptr", "cannot use the driver", "nvidia-smi"),
    (
        "Could not find any implementation for node {ForeignNode[/up/0...]}.",
        "no implementation for the node",
        "keep_fp32",
    ),
    ("Requested amount of GPU memory (34 GB): OutOfMemory", "ran out of memory", "more memory"),
]


@pytest.mark.parametrize(("words", "message", "hint"), WORDS, ids=[row[1] for row in WORDS])
def test_words_of_the_builder_become_a_sentence_and_a_remedy(
    words: str, message: str, hint: str
) -> None:
    error = compile_error("tensorrt-rtx 1.7.1", "unet", words)
    assert type(error) is CompileError
    assert error.message.startswith("tensorrt-rtx 1.7.1 refuses unet: ")
    assert message in error.message
    assert words in error.message
    assert hint in error.hint


def test_words_that_nobody_knows_are_passed_on_whole() -> None:
    assert compile_error("it", "unet", "odd thing").message == "it refuses unet: odd thing"


def test_missing_operators_are_named_once_and_their_nodes_up_to_twenty() -> None:
    words = (
        "In node 4 with name: custom and operator: MyCustomOp (checkFallbackPluginImporter): "
        'INVALID_NODE: creator && "Plugin not found, are the plugin name, version, and namespace '
        'correct?"'
    )
    bad = [
        BadNode(op_type="MyCustomOp", name=f"custom_{k}", reason=words, is_missing=True)
        for k in range(25)
    ]
    error = parse_error("it", "unet", bad, "")
    assert isinstance(error, UnsupportedOpError)
    assert error.message.count("custom_") == 20
    assert "and 5 more nodes" in error.message


def test_a_node_that_is_wrong_is_no_missing_operator() -> None:
    bad = [BadNode(op_type="Add", name="sum", reason="shapes differ", is_missing=False)]
    error = parse_error("it", "unet", bad, "")
    assert not isinstance(error, UnsupportedOpError)
    assert "Add sum: shapes differ" in error.message


@pytest.mark.parametrize(
    ("cuda", "major", "code", "words"),
    [
        (None, 13, "no-driver", "libcuda"),
        (StubCuda(init=100), 13, "no-driver", "finds no card (CUDA error 100)"),
        (StubCuda(init=34), 13, "no-driver", "stub"),
        (StubCuda(init=803), 13, "no-driver", "different versions"),
        (StubCuda(cuda=12080), 13, "driver-too-old", "550.54 has CUDA 12.8"),
        (StubCuda(address="0000:02:00.0"), 13, "not-in-cuda", "0000:01:00.0"),
    ],
    ids=["none", "no card", "stub library", "mismatch", "too old", "hidden"],
)
def test_a_driver_that_does_not_serve_is_a_problem_with_a_remedy(
    cuda: StubCuda | None, major: int, code: str, words: str
) -> None:
    def load() -> Any:
        if cuda is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return cuda

    answer = find_card(CARD, cuda_major=major, load=load)
    assert isinstance(answer, Problem)
    assert answer.code == code
    assert words in answer.message
    assert answer.hint


def test_a_driver_of_cuda_12_serves_the_runtime_of_cuda_12() -> None:
    card = find_card(CARD, cuda_major=12, load=lambda: StubCuda(cuda=12080))
    assert card == Card(
        ordinal=0, name="NVIDIA Stub 4090", arch="sm_89", processors=128, cuda=(12, 8)
    )


def test_this_machine_gives_an_answer_and_stays_alive() -> None:
    assert isinstance(find_card(CARD, cuda_major=13), Card | Problem)


def test_memory_for_a_build_is_estimated_as_it_was_measured() -> None:
    # SD1.5's UNet in float16: 1.72 GB of weights, 5.7 GB at the peak.
    assert estimated_peak_bytes(1_718_935_040) == pytest.approx(5.9e9, rel=0.05)


def test_a_containers_limit_is_the_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("123456789\n")
    monkeypatch.setattr(build_memory, "_CGROUP_LIMITS", (limit, tmp_path / "none"))
    assert machine_bytes() == 123456789
    limit.write_text("max\n")
    have = machine_bytes()
    assert have is not None
    assert have > 123456789


def header(version: tuple[int, int, int, int] = (1, 7, 1, 116), bits: int = 0x18) -> bytes:
    head = bytearray(64)
    head[:4] = b"vtrt"
    head[0x18:0x1C] = bytes(version)
    head[0x20] = bits
    return bytes(head)


def test_a_plans_header_says_version_and_targets() -> None:
    found = header_from_bytes(header())
    assert (found.version, found.archs) == ("1.7.1.116", ("sm_89", "sm_120"))
    assert not differences(found, version="1.7.1.116", archs=["sm_120", "sm_89"])
    assert "1.7.1.116" in differences(found, version="1.8.0.1", archs=[])
    assert "sm_89, sm_120, not sm_86" in differences(found, version="1.7.1.116", archs=["sm_86"])
    every = header_from_bytes(header(bits=0x7E))
    assert differences(every, version="1.7.1.116", archs=["sm_89"])


@pytest.mark.parametrize("head", [b"", b"vtrt", b"ONNX" + bytes(60)])
def test_what_is_no_plan_is_said_to_be_none(head: bytes) -> None:
    with pytest.raises(ValueError, match="no TensorRT-RTX plan"):
        header_from_bytes(head)


def test_the_narrowest_profile_that_holds_a_request_is_chosen() -> None:
    usual = (1, 4, 64, 64)
    wide = {"sample": InputRange(least=(1, 4, 8, 8), usual=usual, largest=(8, 4, 128, 128))}
    two = (2, 4, 64, 64)
    narrow = {"sample": InputRange(least=two, usual=two, largest=two)}
    profiles = (wide, narrow)
    assert profile_holding(profiles, {"sample": (2, 4, 64, 64)}) == 1
    assert profile_holding(profiles, {"sample": (1, 4, 64, 64)}) == 0
    assert profile_holding(profiles, {"sample": (1, 4, 256, 64)}) is None
    assert free_shapes(profiles) == {"sample": (-1, 4, -1, -1)}
    assert Ranges() == Ranges(batch=None)
