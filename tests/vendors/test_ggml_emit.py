"""Programs in C++ give the numbers of our engine, bit for bit, with the same libraries."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ggml_emit_cases import CASES, HOSTILE
from ggml_harness import SAMPLE, compiled, shapes_for
from sdkit_dispatch.errors import CacheError, UnsupportedOpError
from sdkit_ggml.emit.names import RESERVED, comment, identifier, identifiers, literal
from sdkit_ggml.emit.program_folder import write_program

STRICT = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror")
SHARED = ("arrays", "graph", "host", "weights_file")
"""Sources that are the same in every program: compiled once."""


STANDARD = """
#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "ggml-cpp.h"
"""
"""What most sources include, and what compiling them takes longest for: compiled once."""


@dataclass
class Kit:
    """A compiler, the libraries of libggml-python, and what our engine computes with them."""

    compiler: str
    include: Path
    libraries: Path
    work: Path
    _programs: dict[str, Path] = field(default_factory=dict)

    def program(self, name: str) -> Path:
        """Returns the program of a case, compiled without a warning."""
        if name not in self._programs:
            source, out = self.work / name / "program" / "src", self.work / name / "objects"
            out.mkdir()
            sources = [one for one in source.glob("*.cpp") if one.stem not in SHARED]
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda one: self._compiled(one, out), sources))
            objects += [self._shared(source / f"{stem}.cpp") for stem in SHARED]
            program = self.work / name / "compiled"
            libraries = [f"-l{one}" for one in ("ggml", "ggml-cpu", "ggml-base")]
            places = (f"-L{self.libraries}", f"-Wl,-rpath,{self.libraries}")
            quiet_run(self.compiler, *objects, *places, *libraries, "-o", program)
            self._programs[name] = program
        return self._programs[name]

    def _shared(self, source: Path) -> Path:
        found = self.work / f"{source.stem}.o"
        return found if found.exists() else self._compiled(source, self.work)

    def _compiled(self, source: Path, out: Path) -> Path:
        standard, target = self.work / "standard.h", out / f"{source.stem}.o"
        flags = (*STRICT, "-isystem", self.include)
        quiet_run(self.compiler, *flags, "-include", standard, "-c", source, "-o", target)
        return target


def quiet_run(*command: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == code, f"{command[0]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


def libggml_folder() -> Path:
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("libggml-python, whose headers programs are compiled with, is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    if os.name == "nt":
        pytest.skip("the compiler is called as on Linux and macOS")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    root = libggml_folder()
    libraries = next(path for path in (root / "lib64", root / "lib") if path.is_dir())
    work = tmp_path_factory.mktemp("emit")
    environ = {**os.environ, "SDKIT_GGML_DIR": str(libraries)}
    script = Path(__file__).with_name("ggml_emit_cases.py")
    done = subprocess.run(
        [sys.executable, script, work], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    standard = work / "standard.h"
    standard.write_text(STANDARD)
    quiet_run(compiler, *STRICT, "-isystem", root / "include", "-x", "c++-header", standard)
    return Kit(compiler, root / "include", libraries, work)


def assert_same_files(found: Path, wanted: Path) -> None:
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        one, other = np.load(found / name), np.load(wanted / name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_bits_of_our_engine(name: str, kit: Kit, tmp_path: Path) -> None:
    case = kit.work / name
    for wanted in sorted((case / "wanted").iterdir()):
        out = tmp_path / wanted.name
        out.mkdir()
        quiet_run(
            *(kit.program(name), case / "program" / "weights.gguf", "--in", case / "in"),
            *("--out", out, "--threads", "1", "--variant", wanted.name),
        )
        assert_same_files(out, wanted)


def test_cases_are_what_their_names_say(kit: Kit) -> None:
    graphs = {name: kit.work / name / "program" / "src" for name in CASES}
    text = (graphs["vae_blocks"] / "graph_cpu_flash.cpp").read_text()
    # Parts of one convolution are copied into its result.
    nodes = text.split("\n    // ")
    assert any(one.startswith("Conv ") and one.count("ggml_cpy") >= 3 for one in nodes)
    assert "GGML_TYPE_F16" in (graphs["vae_float16"] / "graph_cpu_flash.cpp").read_text()
    assert "q8_0 [" in (graphs["unet_q8"] / "component.h").read_text()
    assert "row_numbers(" in (graphs["text_float16"] / "component.cpp").read_text()


def test_cmake_builds_a_program_that_computes_and_measures(kit: Kit, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    case, build, out = kit.work / "vae_decoder", tmp_path / "build", tmp_path / "out"
    settings = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-Werror", "-DGGML_FETCH=OFF")
    # Its own build folder; cmake looks for a compiler as it would for a user.
    quiet_run(
        *(cmake, "-S", case / "program", "-B", build),
        *(f"-DGGML_DIR={kit.include.parent}", *settings),
    )
    quiet_run(cmake, "--build", build, "--parallel", "2")
    out.mkdir()
    done = quiet_run(
        *(build / "vae_decoder", case / "program" / "weights.gguf", "--in", case / "in"),
        *("--out", out, "--threads", "1", "--bench", "2"),
    )
    assert "2 runs" in done.stdout
    assert_same_files(out, case / "wanted" / "cpu, flash attention")


def test_cmake_says_that_an_installed_ggml_has_no_such_platform(kit: Kit, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    done = quiet_run(
        *(cmake, "-S", kit.work / "unet" / "program", "-B", tmp_path, "-DGGML_CUDA=1"),
        f"-DGGML_DIR={kit.include.parent}",
        code=1,
    )
    assert "has no ggml-cuda" in done.stderr


def test_wrong_files_and_words_are_named_before_anything_is_computed(
    kit: Kit, tmp_path: Path
) -> None:
    case, program = kit.work / "text_encoder", kit.program("text_encoder")
    weights = case / "program" / "weights.gguf"

    def complaint(*words: object) -> str:
        return quiet_run(program, *words, code=1).stderr

    ids = np.load(case / "in" / "input_ids.npy")
    for name, array in {
        "short": ids[:1],
        "float": ids.astype(np.float32),
        "beyond": np.full_like(ids, 1 << 30),
    }.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "input_ids.npy", array)
    assert "(1, 77)" in complaint(weights, "--in", tmp_path / "short")
    assert "<i8" in complaint(weights, "--in", tmp_path / "float")
    assert "49408 rows" in complaint(weights, "--in", tmp_path / "beyond")
    assert "input_ids" in complaint(weights, "--in", tmp_path)
    assert "--bench" in complaint(weights, "--bench", "many")
    assert "--list" in complaint(weights, "--device", "Abacus0")
    assert "another program" in complaint(kit.work / "unet" / "program" / "weights.gguf")
    assert "GGUF" in complaint(case / "in" / "input_ids.npy")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(weights.read_bytes()[:-4096])
    assert quiet_run(program, cut, code=1).stderr


def test_raw_numbers_are_read_too(kit: Kit, tmp_path: Path) -> None:
    case, out, raw = kit.work / "text_encoder", tmp_path / "out", tmp_path / "in"
    out.mkdir()
    raw.mkdir()
    (raw / "input_ids.bin").write_bytes(np.load(case / "in" / "input_ids.npy").tobytes())
    weights = case / "program" / "weights.gguf"
    quiet_run(kit.program("text_encoder"), weights, "--in", raw, "--out", out, "--threads", "1")
    assert_same_files(out, case / "wanted" / "cpu, plain attention")


def test_code_names_the_onnx_nodes_and_shapes(kit: Kit) -> None:
    text = (kit.work / "unet" / "program" / "src" / "graph_cpu_flash.cpp").read_text()
    assert '// Conv "/m/conv_in/Conv"\n' in text
    assert re.search(r"ggml_silu\(g\.ctx, \w+\)\);  // f32 \[\d+, \d+", text)
    steps = len(re.findall(r"g\.(put|put_shared|write)\(", text))
    assert f"{steps} operations" in text


def test_the_same_engine_gives_the_same_bytes(tmp_path: Path) -> None:
    path = SAMPLE / "text_encoder" / "model.onnx"
    texts = []
    for turn in ("one", "two"):
        engine = compiled(path, shapes_for(path), tmp_path / turn / "engine").engine
        out = tmp_path / turn / "program"
        out.mkdir()
        write_program(engine, out)
        texts.append(
            {
                file.relative_to(out).as_posix(): file.read_bytes()
                for file in sorted(out.rglob("*"))
                if file.is_file()
            }
        )
    assert texts[0] == texts[1]
    assert not any(str(tmp_path).encode() in text for text in texts[0].values())


def test_a_program_for_a_build_of_ours_fetches_the_release_of_its_version(tmp_path: Path) -> None:
    path = SAMPLE / "text_encoder" / "model.onnx"
    engine = compiled(path, shapes_for(path), tmp_path / "engine").engine
    own = replace(engine.request, runtime="ggml 0.20.2 (build 1a2b3c4d)")
    out = tmp_path / "program"
    out.mkdir()
    write_program(replace(engine, request=own), out)
    assert re.search(r"GIT_TAG v0\.20\.2$", (out / "CMakeLists.txt").read_text(), re.MULTILINE)


def test_what_the_host_computes_and_emit_does_not_write_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text_encoder" / "model.onnx"
    path.parent.mkdir()
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])
    table = numpy_helper.from_array(np.ones((8, 4), np.float32), "table")
    limit = numpy_helper.from_array(np.array(8, np.int64), "limit")
    nodes = [
        helper.make_node("Mod", ["ids", "limit"], ["rows"]),
        helper.make_node("Gather", ["table", "rows"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [ids], [y], [table, limit])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    engine = compiled(path, {"ids": (2,)}, tmp_path / "engine").engine
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedOpError, match="text_encoder.*Mod") as caught:
        write_program(engine, tmp_path / "out")
    assert caught.value.hint


def test_a_damaged_engine_is_not_written(tmp_path: Path) -> None:
    path = SAMPLE / "text_encoder" / "model.onnx"
    made = compiled(path, shapes_for(path), tmp_path / "engine")
    weights = made.folder / "weights.gguf"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "out").mkdir()
    with pytest.raises(CacheError, match="text_encoder"):
        write_program(made.engine, tmp_path / "out")


def test_names_never_reach_cpp_as_they_are() -> None:
    names = [HOSTILE, "", "1", "int", "EOF", "a/b", "a.b", "A/B", "__x", "é", "??/", "_"]
    found = identifiers(names)
    assert len({one.lower() for one in found.values()}) == len(names)
    for one in found.values():
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", one)
        assert "__" not in one
        assert one not in RESERVED
    assert literal('a"\\\n?é') == '"a\\042\\134\\012\\077\\303\\251"'
    assert comment("a*/b\\\n/*é") == "a*~b~~~*~"
    assert identifier("sample") == "sample"
