"""Judges a picture of the sample pipeline: which digit, which colour.

scikit-learn's `SVC(gamma=0.001)`, fitted on `load_digits`, reads the digit: it was the data that
the sample was trained on too, so the judge tests obedience to the prompt and not quality.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (1.0, 0.15, 0.1),
    "green": (0.1, 0.9, 0.2),
    "blue": (0.2, 0.35, 1.0),
    "white": (1.0, 1.0, 1.0),
}
PROMPTS = tuple((colour, digit) for colour in COLOURS for digit in DIGITS)
"""Every (colour, digit) that the sample knows; the prompt is `a {colour} {digit}`."""

_BRIGHTEST = 60
"""Pixels of a channel that are taken for the stroke."""


def fit_digit_reader() -> Any:  # Any: scikit-learn has no types
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    digits = load_digits()
    return SVC(gamma=0.001).fit(digits.data, digits.target)


def read_digit(reader: Any, image: NDArray[np.uint8]) -> str:
    """Returns the name of the digit on a 32x32 picture `[32, 32, 3]`."""
    if image.shape != (32, 32, 3):
        raise ValueError(f"the judge reads 32x32 pictures, not {image.shape}")
    stroke = image.astype(np.float64).max(axis=-1) / 255
    small = stroke.reshape(8, 4, 8, 4).mean(axis=(1, 3)) * 16
    return DIGITS[int(reader.predict(small.reshape(1, 64))[0])]


def read_colour(image: NDArray[np.uint8]) -> str:
    """Returns the name of the colour of the stroke on a picture `[H, W, 3]`."""
    channels = np.sort(image.reshape(-1, 3).astype(np.float64) / 255, axis=0)
    stroke = channels[-_BRIGHTEST:].mean(axis=0)
    distances = {name: np.abs(stroke - np.array(rgb)).sum() for name, rgb in COLOURS.items()}
    return min(distances, key=lambda name: distances[name])
