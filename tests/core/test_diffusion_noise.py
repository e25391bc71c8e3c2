from __future__ import annotations

import math

import numpy as np
import pytest

from sdkit_dispatch.diffusion.noise import (
    MAX_SEED,
    gaussian,
    image_seeds,
    start_noise,
    step_noise,
)
from sdkit_dispatch.errors import ConfigError

SHAPE = (4, 8, 8)

KNOWN_NOISE_OF_SEED_1 = (0.897444665, -1.2565397, 1.89050055, 0.374271482, 0.434082001, 0.147300288)
LAST_BIT = 2e-7
"""What another platform's log and sine may change in a float32 near 1."""


def test_noise_of_a_seed_never_changes() -> None:
    """Images are remembered by their seeds: these numbers are a promise."""
    np.testing.assert_allclose(
        gaussian(1, 0, (6,)),
        KNOWN_NOISE_OF_SEED_1,
        rtol=LAST_BIT,
    )


def test_numbers_follow_from_the_raw_words_of_philox() -> None:
    words = np.random.Philox(key=np.array([42, 3], dtype=np.uint64)).random_raw(2)
    first, second = ((int(word) >> 11) + 0.5 for word in words)
    radius = math.sqrt(-2 * math.log(first / 2**53))
    angle = 2 * math.pi * second / 2**53
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    np.testing.assert_allclose(gaussian(42, 3, (2,)), expected, rtol=LAST_BIT)


def test_image_of_a_batch_has_the_noise_of_its_own_seed() -> None:
    seeds = image_seeds(100, 3)
    batch = start_noise(seeds, SHAPE)
    assert batch.shape == (3, *SHAPE)
    assert batch.dtype == np.float32
    for index, seed in enumerate(seeds):
        np.testing.assert_array_equal(batch[index], start_noise((seed,), SHAPE)[0])
        np.testing.assert_array_equal(
            step_noise(seeds, 7, SHAPE)[index], step_noise((seed,), 7, SHAPE)[0]
        )


def test_steps_and_seeds_have_noise_of_their_own() -> None:
    streams = [start_noise((1,), SHAPE), start_noise((2,), SHAPE)]
    streams += [step_noise((seed,), step, SHAPE) for seed in (1, 2) for step in range(3)]
    flat = np.stack([stream.ravel() for stream in streams])
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    # 256 numbers: independent streams stay within about 4 / sqrt(256).
    assert np.abs(correlation).max() < 0.25


def test_noise_is_standard_normal() -> None:
    noise = gaussian(9, 0, (1_000_000,)).astype(np.float64)
    # Five standard errors of mean, variance and kurtosis over a million draws.
    assert abs(noise.mean()) < 5e-3
    assert abs(noise.var() - 1) < 5 * math.sqrt(2) * 1e-3
    assert abs((noise**4).mean() - 3) < 5 * math.sqrt(96) * 1e-3
    assert np.isfinite(noise).all()


def test_odd_sizes_are_filled() -> None:
    np.testing.assert_array_equal(gaussian(3, 0, (5,)), gaussian(3, 0, (6,))[:5])


@pytest.mark.parametrize(("seed", "batch"), [(-1, 1), (MAX_SEED + 1, 1), (MAX_SEED, 2)])
def test_seed_outside_the_range_of_all_vendors_is_refused(seed: int, batch: int) -> None:
    with pytest.raises(ConfigError, match=f"seed {seed} with a batch of {batch}"):
        image_seeds(seed, batch)


def test_largest_seed_works() -> None:
    assert image_seeds(MAX_SEED - 1, 2) == (MAX_SEED - 1, MAX_SEED)
    assert np.isfinite(start_noise((MAX_SEED,), SHAPE)).all()
