"""How a global batch is cut for replicas that must go in step: everything counts once, and nobody waits for long."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrun.data.order import Cut

LOTS = settings(max_examples=150)


def cuts(in_step: bool):
    return st.builds(
        Cut,
        micro=st.none() | st.integers(1, 12),
        in_step=st.just(in_step),
        equal=st.booleans() if in_step else st.just(False),
        pieces=st.integers(1, 9),
        multiple_of=st.integers(1, 4),
    )


SIZES, PARTS = st.integers(1, 60), st.integers(1, 9)


def parts_of(cut: Cut, size: int, parts: int) -> tuple[list[int], list[list[tuple[list[int], int]]]]:
    """A batch whose ids are not their places, and every replica's pieces of it."""
    ids = np.arange(size, dtype=np.int64) * 7 + 100
    return ids.tolist(), [cut.of(ids, part, parts) for part in range(parts)]


@given(cut=cuts(True) | cuts(False), size=SIZES, parts=PARTS)
@LOTS
def test_every_sample_counts_once_over_all_replicas_in_order(cut: Cut, size: int, parts: int):
    ids, found = parts_of(cut, size, parts)
    assert [number for pieces in found for piece, real in pieces for number in piece[:real]] == ids


@given(cut=cuts(True) | cuts(False), size=SIZES, parts=PARTS)
@LOTS
def test_no_piece_has_more_rows_than_a_micro_batch_may(cut: Cut, size: int, parts: int):
    _, found = parts_of(cut, size, parts)
    assert all(len(piece) <= (cut.micro or size) for pieces in found for piece, _ in pieces)


@given(cut=cuts(True), size=SIZES, parts=PARTS)
@LOTS
def test_in_step_every_replica_has_as_many_pieces_and_none_is_empty(cut: Cut, size: int, parts: int):
    _, found = parts_of(cut, size, parts)
    (count,) = {len(pieces) for pieces in found}
    assert count >= 1 and count % cut.multiple_of == 0
    assert all(piece for pieces in found for piece, _ in pieces)


@given(cut=cuts(True), size=SIZES, parts=PARTS)
@LOTS
def test_equal_pieces_have_the_same_number_of_rows_on_all_replicas(cut: Cut, size: int, parts: int):
    _, found = parts_of(cut, size, parts)
    if cut.equal:
        assert len({len(piece) for pieces in found for piece, _ in pieces}) == 1


@given(cut=cuts(True), size=SIZES, parts=PARTS)
@LOTS
def test_rows_that_only_fill_up_are_samples_of_the_batch_and_never_count(cut: Cut, size: int, parts: int):
    ids, found = parts_of(cut, size, parts)
    for pieces in found:
        for piece, real in pieces:
            assert 0 <= real <= len(piece) and set(piece) <= set(ids)
            assert set(piece[real:]) <= {piece[real - 1] if real else ids[0]}, "its own last one, where it has any"
            if not cut.equal:
                assert len(piece) == max(real, 1), "a row more than needed is work for nothing"


@given(cut=cuts(True), size=SIZES, parts=PARTS)
@LOTS
def test_a_pipeline_gets_the_pieces_it_asked_for_while_there_are_samples(cut: Cut, size: int, parts: int):
    _, found = parts_of(cut, size, parts)
    largest = -(-size // parts)
    wanted = -(-largest // cut.micro) if cut.micro else min(cut.pieces, largest)
    assert wanted <= len(found[0]) < wanted + cut.multiple_of


@given(size=SIZES, parts=PARTS, micro=st.none() | st.integers(1, 12))
@LOTS
def test_out_of_step_nothing_is_borrowed(size: int, parts: int, micro: int | None):
    _, found = parts_of(Cut(micro), size, parts)
    assert all(len(piece) == real for pieces in found for piece, real in pieces)
