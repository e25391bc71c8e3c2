"""Text -> CLIP token ids, in chunks that a text encoder takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.errors import PipelineError

DEFAULT_CHUNK_TOKENS = 77
"""Positions of every CLIP text model that Stable Diffusion uses, start and end included."""

_START = "<|startoftext|>"
_END = "<|endoftext|>"
_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
"""What counts as a word, a digit or a run of signs before byte pairs are merged.

Source: OpenAI CLIP, `SimpleTokenizer.pat`.
"""


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer:
    """The byte-pair tokenizer of one text encoder.

    Attributes:
        encoder: A `tokenizers.Tokenizer` (`Any`: the package has no types) that adds nothing.
        chunk_tokens: Tokens of a chunk, start and end included.
    """

    encoder: Any
    start: int
    end: int
    pad: int
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    def ids(self, text: str) -> list[int]:
        """Returns the ids of `text` alone: no start, end or padding, any length."""
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def chunk_count(self, text: str) -> int:
        """Returns how many chunks `text` fills; at least one."""
        return max(1, -(-len(self.ids(text)) // (self.chunk_tokens - 2)))

    def chunks(self, text: str, count: int) -> NDArray[np.int64]:
        """Returns `text` as `[count, chunk_tokens]` ids.

        Every chunk has its own start and end, as the text encoder was trained on. Chunks past the
        end of `text` are empty; tokens past the last chunk are dropped.
        """
        ids = self.ids(text)
        room = self.chunk_tokens - 2
        rows = np.full((count, self.chunk_tokens), self.pad, dtype=np.int64)
        for row in range(count):
            filled = [self.start, *ids[row * room : (row + 1) * room], self.end]
            rows[row, : len(filled)] = filled
        return rows


def load_tokenizer(folder: Path, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> ClipTokenizer:
    """Opens a tokenizer folder of a pipeline.

    It holds `tokenizer.json` (transformers 4 and 5) or `vocab.json` and `merges.txt` (the slow
    tokenizers of transformers 4).

    Raises:
        PipelineError: A file is missing or not readable, or a special token is not in it.
    """
    try:
        encoder = _open_encoder(folder)
        names = _special_tokens(folder)
        # transformers takes every special token as such in the text too: with "!" for padding,
        # a "!" in a prompt is the padding token and not the sign of the vocabulary.
        _add_special_tokens(encoder, names.values())
    except PipelineError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise PipelineError(
            f"tokenizer folder {folder} cannot be read: {error}",
            "export the pipeline again, or copy the folder from the original pipeline",
        ) from error
    encoder.no_truncation()
    encoder.no_padding()

    def token_id(role: str) -> int:
        found = encoder.token_to_id(names[role])
        if found is None:
            raise PipelineError(
                f"tokenizer folder {folder}: {role} {names[role]!r} is not in its vocabulary "
                f"of {encoder.get_vocab_size()} tokens",
                f"correct {role} in {folder / 'tokenizer_config.json'}",
            )
        return int(found)

    return ClipTokenizer(
        encoder=encoder,
        start=token_id("bos_token"),
        end=token_id("eos_token"),
        pad=token_id("pad_token"),
        chunk_tokens=chunk_tokens,
    )


def _open_encoder(folder: Path) -> Any:  # Any: `tokenizers` has no types
    from tokenizers import Tokenizer

    whole = folder / "tokenizer.json"
    if whole.is_file():
        return Tokenizer.from_str(whole.read_text(encoding="utf-8"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return _encoder_from_vocab(vocab, merges)
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    raise PipelineError(
        f"tokenizer folder {folder} needs tokenizer.json, or vocab.json and merges.txt; "
        f"it has {', '.join(present) or 'no files'}",
        "copy the tokenizer folder from the original pipeline",
    )


def _encoder_from_vocab(vocab: Path, merges: Path) -> Any:  # Any: `tokenizers` has no types
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    encoder = Tokenizer(
        models.BPE.from_file(str(vocab), str(merges), unk_token=_END, end_of_word_suffix="</w>")
    )
    encoder.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return encoder


def _add_special_tokens(encoder: Any, names: Iterable[str]) -> None:
    """Marks tokens of the vocabulary; one that is not in it is left for the caller to report."""
    from tokenizers import AddedToken

    encoder.add_special_tokens(
        [
            AddedToken(name, normalized=False, special=True)
            for name in dict.fromkeys(names)
            if encoder.token_to_id(name) is not None
        ]
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """Role -> token. SD1.x pads with the end token, SD2.x and SDXL's second tokenizer with "!".

    Files of old transformers disagree: tokenizer_config.json of SD2.x says the end token and
    special_tokens_map.json says "!". transformers lets the map win unless the configuration
    carries `added_tokens_decoder`, and so do we.
    """
    config = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json")
    sources = [config, special] if "added_tokens_decoder" in config else [special, config]
    names = {"bos_token": _START, "eos_token": _END}
    for role in ("bos_token", "eos_token", "pad_token"):
        for source in sources:
            if (name := _token_name(source.get(role))) is not None:
                names[role] = name
                break
    names.setdefault("pad_token", names["eos_token"])
    return names


def _token_name(value: object) -> str | None:
    if isinstance(value, Mapping):  # an AddedToken, written out
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> Mapping[str, Any]:  # Any: whatever transformers wrote
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}
