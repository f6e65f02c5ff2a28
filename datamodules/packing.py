"""Ragged documents into rows of equal length: best fit, longest first, the same on every machine."""

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of pieces, filled so that little room is left.

    Pieces are taken from the longest to the shortest, equal ones in their order, each into the row
    with the least room that still holds it.

    Args:
        lengths: [N] positions of each piece, 1 to capacity.
        capacity: positions of a row.

    Returns:
        order [N] int64, the pieces row by row in ascending order, and offsets [rows + 1] int64:
        row r holds order[offsets[r]:offsets[r + 1]].
    """
    row_of = np.empty(len(lengths), np.int64)
    rooms: list[int] = []  # the different amounts of room, ascending
    rows_with: dict[int, list[int]] = {}
    num_rows = 0
    sizes = lengths.tolist()
    for piece in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        size = sizes[piece]
        place = bisect_left(rooms, size)
        if place == len(rooms):
            row, room = num_rows, capacity
            num_rows += 1
        else:
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[place]
        row_of[piece] = row
        if room > size:
            if room - size not in rows_with:
                rows_with[room - size] = []
                insort(rooms, room - size)
            rows_with[room - size].append(row)
    order = np.argsort(row_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return order.astype(np.int64), offsets.astype(np.int64)
