"""Seeds -> Gaussian noise that is the same on every vendor, platform and numpy version.

numpy promises that the raw words of its Philox bit generator never change, but not that
`standard_normal` keeps its algorithm (NEP 19). So the normal numbers are made here, from the raw
words, by the Box-Muller transform in double precision; the only freedom left to a platform is the
last bit of its `log`, `sin` and `cos`, far below float32.

The key of the generator is (seed, stream). Stream 0 is the latents an image starts from; stream
`1 + i` is the noise that step `i` of an ancestral sampler adds. So an image depends on its own
seed alone, never on its place in a batch or on how many draws came before.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.errors import ConfigError

MAX_SEED = 2**63 - 1
"""Of every image of a batch. stable-diffusion.cpp takes a signed number, and replaces a negative
one by a random one; a request means the same to every vendor, or is refused."""


def image_seeds(seed: int, batch: int) -> tuple[int, ...]:
    """Returns the seeds of a batch: `seed`, `seed + 1`, ...

    Raises:
        ConfigError: A seed is negative or larger than `MAX_SEED`.
    """
    if not 0 <= seed <= seed + batch - 1 <= MAX_SEED:
        raise ConfigError(
            f"seed {seed} with a batch of {batch} is outside 0..{MAX_SEED}", "pass --seed 0"
        )
    return tuple(range(seed, seed + batch))


def start_noise(seeds: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns unit noise `[len(seeds), *shape]` for the latents that denoising starts from."""
    return np.stack([gaussian(seed, 0, shape) for seed in seeds])


def step_noise(seeds: tuple[int, ...], step: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns unit noise `[len(seeds), *shape]` for step `step`, counted from 0."""
    return np.stack([gaussian(seed, 1 + step, shape) for seed in seeds])


def gaussian(seed: int, stream: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns standard normal numbers of one (seed, stream), in C order."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    philox = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    # The 53 high bits of each word, shifted by half a step: never 0, so the log is finite.
    words = philox.random_raw(2 * pairs).astype(np.uint64) >> np.uint64(11)
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[0::2]))
    angle = 2.0 * np.pi * uniform[1::2]
    normal = np.empty(2 * pairs)
    normal[0::2] = radius * np.cos(angle)
    normal[1::2] = radius * np.sin(angle)
    return normal[:count].astype(np.float32).reshape(shape)
