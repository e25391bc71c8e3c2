"""Places buffers in one arena, so that those alive at the same time do not overlap."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

ALIGNMENT = 256
"""Of every buffer: the largest that a device's driver asks of a storage buffer's offset."""


def plan_memory(
    sizes: Mapping[int, int],
    spans: Mapping[int, tuple[int, int]],
    same: Mapping[int, int],
) -> tuple[dict[int, int], int]:
    """Returns the offset of every buffer and the size of the arena.

    Args:
        sizes: Buffer -> bytes.
        spans: Buffer -> the first and the last step that touches it.
        same: Buffer -> an older buffer whose memory it takes over (it dies as this one is born).
    """
    owner: dict[int, int] = {}
    for buffer in sorted(sizes):
        owner[buffer] = owner.get(same[buffer], same[buffer]) if buffer in same else buffer
    lives: dict[int, tuple[int, int]] = {}
    room: dict[int, int] = {}
    for buffer, root in owner.items():
        first, last = spans[buffer]
        if root in lives:
            first, last = min(first, lives[root][0]), max(last, lives[root][1])
        lives[root] = (first, last)
        room[root] = max(room.get(root, 0), _aligned(sizes[buffer]))
    placed = min(
        (_first_fit(order, lives, room) for order in _orders(lives, room)),
        key=lambda result: result[1],
    )
    offsets, total = placed
    return {buffer: offsets[root] for buffer, root in owner.items()}, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _orders(
    lives: Mapping[int, tuple[int, int]], room: Mapping[int, int]
) -> tuple[Sequence[int], ...]:
    # Large ones first packs best where few buffers dominate (a VAE), birth order where none does.
    return (
        sorted(lives, key=lambda root: (-room[root], lives[root][0])),
        sorted(lives, key=lambda root: lives[root]),
    )


def _first_fit(
    order: Sequence[int], lives: Mapping[int, tuple[int, int]], room: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """Places buffers in the lowest gap that stays free for their whole life."""
    offsets: dict[int, int] = {}
    total = 0
    steps = max((last for _, last in lives.values()), default=0) + 1
    # Long lives are looked at for every buffer; short ones only by those that meet them.
    grain = max(1, steps // 256)
    cells: list[list[tuple[int, int, int]]] = [[] for _ in range(steps // grain + 1)]
    for root in order:
        first, last = lives[root]
        size = room[root]
        seen: dict[int, tuple[int, int]] = {}
        for cell in range(first // grain, last // grain + 1):
            for offset, end, other in cells[cell]:
                if other not in seen and _meet(lives[other], (first, last)):
                    seen[other] = (offset, end)
        at = 0
        for offset, end in sorted(seen.values()):
            if offset - at >= size:
                break
            at = max(at, end)
        offsets[root] = at
        total = max(total, at + size)
        for cell in range(first // grain, last // grain + 1):
            insort(cells[cell], (at, at + size, root))
    return offsets, total


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]
