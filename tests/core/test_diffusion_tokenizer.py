from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdkit_dispatch.diffusion.tokenizer import ClipTokenizer, load_tokenizer
from sdkit_dispatch.errors import PipelineError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "sdkit_dispatch" / "_data" / "sample" / "digits-sd" / "tokenizer"
RECORDED = json.loads(
    (Path(__file__).parent / "data" / "diffusion" / "tokenizer.json").read_text(encoding="utf-8")
)
START, END = 49406, 49407


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def old_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary as vocab.json and merges.txt, as transformers 4 wrote them."""
    folder = tmp_path_factory.mktemp("old")
    model = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("prompt", RECORDED["prompts"], ids=lambda prompt: prompt["text"][:30])
def test_ids_are_those_of_transformers(tokenizer: ClipTokenizer, prompt: dict[str, Any]) -> None:
    assert tokenizer.ids(prompt["text"]) == prompt["ids"]


def test_vocab_and_merges_give_the_same_ids(old_files: Path) -> None:
    old = load_tokenizer(old_files)
    for prompt in RECORDED["prompts"]:
        assert old.ids(prompt["text"]) == prompt["ids"], prompt["text"]


def test_a_prompt_that_fits_is_padded_as_transformers_pads(tokenizer: ClipTokenizer) -> None:
    for prompt in RECORDED["prompts"]:
        if len(prompt["ids"]) <= 75:
            assert tokenizer.chunks(prompt["text"], 1).tolist() == [prompt["padded"]]


def test_a_long_prompt_loses_nothing(tokenizer: ClipTokenizer) -> None:
    prompt = max(RECORDED["prompts"], key=lambda prompt: len(prompt["ids"]))
    count = tokenizer.chunk_count(prompt["text"])
    rows = tokenizer.chunks(prompt["text"], count)
    assert rows.shape == (4, 77)
    assert (rows[:, 0] == START).all()
    inner = [token for row in rows.tolist() for token in row[1:-1]]
    assert inner[: len(prompt["ids"])] == prompt["ids"]
    assert set(inner[len(prompt["ids"]) :]) == {END}


def test_the_first_chunk_is_what_transformers_truncates_to(tokenizer: ClipTokenizer) -> None:
    for prompt in RECORDED["prompts"]:
        assert tokenizer.chunks(prompt["text"], 4)[0].tolist() == prompt["padded"]


@pytest.mark.parametrize(
    ("words", "chunks"), [(0, 1), (1, 1), (75, 1), (76, 2), (150, 2), (151, 3)]
)
def test_chunks_hold_75_tokens(tokenizer: ClipTokenizer, words: int, chunks: int) -> None:
    assert tokenizer.chunk_count("cat " * words) == chunks


def test_a_chunk_past_the_end_is_empty_text(tokenizer: ClipTokenizer) -> None:
    rows = tokenizer.chunks("a cat", 2)
    assert rows[1].tolist() == tokenizer.chunks("", 1)[0].tolist()


@pytest.mark.parametrize("case", RECORDED["padding"], ids=lambda case: case["name"])
def test_padding_token_is_the_one_transformers_takes(
    old_files: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(old_files / name)
    for name, data in case["files"].items():
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    found = load_tokenizer(tmp_path)
    assert found.pad == case["id"]
    assert found.ids(case["text"]) == case["ids"]
    assert found.chunks("", 1).tolist() == [[START, END, *[case["id"]] * 75]]


def test_empty_folder_is_reported_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"needs tokenizer\.json, or vocab\.json and merges"):
        load_tokenizer(tmp_path)


def test_damaged_file_is_a_pipeline_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {', encoding="utf-8")
    with pytest.raises(PipelineError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_padding_token_outside_the_vocabulary_is_named(old_files: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(old_files / name)
    config = {"pad_token": "<pad!>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(PipelineError, match="pad_token '<pad!>' is not in its vocabulary"):
        load_tokenizer(tmp_path)
