"""What tests of more than one vendor need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 2 GB of zeros, most of them holes in the file."""
    import seeded_checkpoint  # this file is read before its folder is on the path

    path = tmp_path_factory.mktemp("blank") / "blank.safetensors"
    bias = np.array([1, -1, 0])
    seeded_checkpoint.write_blank(path, {"first_stage_model.decoder.conv_out.bias": bias})
    yield path
    path.unlink()
