"""Records the ids that transformers' CLIPTokenizer gives, and the tokens that it pads with.

Writes tests/core/data/diffusion/tokenizer.json. With `--compare` nothing is written: the recorded
ids are compared with those of the installed transformers. See README.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import CLIPTokenizerFast

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "sdkit_dispatch" / "_data" / "sample" / "digits-sd" / "tokenizer"
OUT = ROOT / "tests" / "core" / "data" / "diffusion" / "tokenizer.json"

PROMPTS = (
    "",
    " ",
    "a red three",
    "A Photo Of An Astronaut Riding A Horse On Mars",
    "masterpiece, best quality, 1girl, solo, long hair, looking at viewer",
    "(masterpiece:1.2), ((best quality)), [lowres], {detailed}",
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit",
    "portrait of a woman, 8k uhd, dslr, f/1.8, 85mm, ISO-100",
    "a cat <lora:add_detail:0.8>",
    "<lora:epi_noiseoffset2:1> dark studio, rim light <lora:LCM_LoRA-v1.5:0.35>",
    "style of greg rutkowski and alphonse mucha, trending on artstation",
    "it's the dog's bowl; they're here, we've won, I'm late, you'll see, he'd go",
    "don't stop, y'all, rock'n'roll",
    "hello   world\twith\ttabs\nand\nnew lines",
    "  leading and trailing  ",
    "1234567890 3.14159 1,000,000 2026-11-30",
    "C++ / C# & F#: 100% @home #1 $9.99 ^_^ ~tilde~ `code`",
    "snake_case and CamelCase and kebab-case",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u0153uvre \u00c5ngstr\u00f6m",
    "cafe\u0301 decomposed, A\u030angstro\u0308m",
    "\u00c9T\u00c9 \u00c0 LA PLAGE",
    "\u4e00\u53ea\u53ef\u7231\u7684\u732b\u5750\u5728\u7a97\u53f0\u4e0a",
    "\u732b\u306e\u4fa7\u9854\u3001\u5915\u713c\u3051\u306e\u6d77",
    "\u30ab\u30bf\u30ab\u30ca\u3068\u3072\u3089\u304c\u306a",
    "\ubc14\ub2e4\ub97c \ubc14\ub77c\ubcf4\ub294 \uace0\uc591\uc774",
    "\u0437\u0430\u043a\u0430\u0442 \u043d\u0430\u0434 \u043c\u043e\u0440\u0435\u043c, "
    "\u041a\u041e\u0422",
    "\u03b7\u03bb\u03b9\u03bf\u03b2\u03b1\u03c3\u03af\u03bb\u03b5\u03bc\u03b1 \u03a3",
    "\u0642\u0637\u0629 \u0639\u0644\u0649 \u0627\u0644\u0633\u0637\u062d",
    "\u0938\u0942\u0930\u094d\u092f\u093e\u0938\u094d\u0924 \u092c\u093f\u0932\u094d\u0932\u0940",
    "\U0001f600\U0001f680 rocket \u2764\ufe0f love",
    "\U0001f469\u200d\U0001f680 astronaut \U0001f1e9\U0001f1ea flag \U0001f44d\U0001f3fd",
    "full\u3000width \uff21\uff22\uff23 \uff01\uff1f",
    "\u201cquotes\u201d \u2018single\u2019 \u2014 dash \u2026 dots \u2022 bullet",
    "x\u00b2 + y\u00b3 = \u00bd \u2248 \u03c0 \u221a2",
    "zero\u200bwidth nb\u00a0space soft\u00adhyphen",
    "<|startoftext|>inside<|endoftext|> the prompt",
    "antidisestablishmentarianism supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;:::---___***///\\\\\\",
    "!",
    "https://example.org/path?query=1&other=two#part",
    "a photo of a cat, " * 14,
    ", ".join(f"detail number {i}" for i in range(60)),
)

START, END = "<|startoftext|>", "<|endoftext|>"
ADDED = {
    "0": {"content": "!", "lstrip": False, "normalized": False, "rstrip": False,
          "single_word": False, "special": True},
}  # fmt: skip
PAD_FILES: dict[str, dict[str, Any]] = {  # Any: JSON files
    "sd1": {
        "tokenizer_config.json": {"pad_token": END, "model_max_length": 77},
        "special_tokens_map.json": {"pad_token": END},
    },
    "sd2: the map says something else": {
        "tokenizer_config.json": {"pad_token": END, "model_max_length": 77},
        "special_tokens_map.json": {"pad_token": "!"},
    },
    "sd2: written out": {
        "tokenizer_config.json": {"pad_token": END, "model_max_length": 77},
        "special_tokens_map.json": {"pad_token": {"content": "!", "normalized": False}},
    },
    "sdxl tokenizer_2": {
        "tokenizer_config.json": {
            "added_tokens_decoder": ADDED,
            "pad_token": "!",
            "model_max_length": 77,
        },
        "special_tokens_map.json": {"pad_token": "!"},
    },
    "the map is ignored": {
        "tokenizer_config.json": {
            "added_tokens_decoder": ADDED,
            "pad_token": "!",
            "model_max_length": 77,
        },
        "special_tokens_map.json": {"pad_token": END},
    },
    "transformers 5 writes no map": {
        "tokenizer_config.json": {"pad_token": "!", "model_max_length": 77},
    },
}


PAD_PROMPT = "wow! a cat!! <|endoftext|> !"
"""A padding token is a special token: transformers takes it as such in the text too."""


def padding(files: dict[str, Any]) -> dict[str, Any]:
    """What transformers pads with, given these files beside vocab.json and merges.txt."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_old_files(folder)
        for file, data in files.items():
            (folder / file).write_text(json.dumps(data), encoding="utf-8")
        tokenizer = CLIPTokenizerFast.from_pretrained(folder)
        ids = tokenizer(PAD_PROMPT, add_special_tokens=False).input_ids
        return {"id": tokenizer.pad_token_id, "ids": ids}


def write_old_files(folder: Path) -> None:
    """Writes vocab.json and merges.txt, as transformers 4 has them."""
    model = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    tokenizer = CLIPTokenizerFast.from_pretrained(TOKENIZER)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_old_files(folder)
        shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
        old = CLIPTokenizerFast.from_pretrained(folder)
    found = {
        "made_with": f"transformers {transformers.__version__}",
        "prompts": [
            {
                "text": text,
                "ids": tokenizer(text, add_special_tokens=False).input_ids,
                "padded": tokenizer(
                    text, padding="max_length", max_length=77, truncation=True
                ).input_ids,
            }
            for text in PROMPTS
        ],
        "padding": [
            {"name": name, "files": files, "text": PAD_PROMPT, **padding(files)}
            for name, files in PAD_FILES.items()
        ],
    }
    if "--compare" in sys.argv:
        recorded = json.loads(OUT.read_text(encoding="utf-8"))
        for kind in ("prompts", "padding"):
            for ours, theirs in zip(recorded[kind], found[kind], strict=True):
                if ours != theirs:
                    print("differs:", ours, theirs)
        for text in PROMPTS:
            if old(text).input_ids != tokenizer(text).input_ids:
                print("vocab.json differs from tokenizer.json:", repr(text))
        print(f"compared with {found['made_with']}: {len(PROMPTS)} prompts, {len(PAD_FILES)} pads")
        return
    OUT.write_text(json.dumps(found, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
