"""Ragged samples in one batch: as long as the longest, with a mask, and nothing that is filled up counts."""

from __future__ import annotations

import pickle

import pytest
import torch

from meshrun import UserError, padded, token_cross_entropy


def sequence(length: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + length)


def test_sequences_are_filled_up_to_the_longest_of_the_batch():
    inputs, targets = padded(fill=9)([(sequence(2), sequence(2)), (sequence(4), sequence(4))])
    assert inputs.tolist() == [[1, 2, 9, 9], [1, 2, 3, 4]]
    assert targets.tolist() == [[1, 2, -100, -100], [1, 2, 3, 4]] and targets.dtype == torch.int64


def test_each_input_has_its_own_length_and_fill_and_the_mask_is_that_of_the_first():
    samples = [
        ({"words": sequence(1), "answer": sequence(3).float()}, sequence(3)),
        ({"words": sequence(3), "answer": sequence(1).float()}, sequence(1)),
    ]
    inputs, targets = padded(fill={"words": 7}, ignore=-1, mask="real")(samples)
    assert inputs["words"].tolist() == [[1, 7, 7], [1, 2, 3]]
    assert inputs["answer"].tolist() == [[1, 2, 3], [1, 0, 0]] and inputs["answer"].dtype == torch.float32
    assert inputs["real"].tolist() == [[True, False, False], [True, True, True]] and list(inputs)[-1] == "real"
    assert targets.tolist() == [[1, 2, 3], [1, -1, -1]]


def test_lengths_can_be_made_multiples_for_layouts_that_cut_sequences():
    samples = [({"a": torch.arange(5)}, torch.arange(5)), ({"a": torch.arange(3)}, torch.arange(3))]
    inputs, targets = padded(fill=7, mask="real", multiple=4)(samples)
    assert inputs["a"].tolist() == [[0, 1, 2, 3, 4, 7, 7, 7], [0, 1, 2, 7, 7, 7, 7, 7]]
    assert inputs["real"].sum(1).tolist() == [5, 3] and (targets == -100).sum(1).tolist() == [3, 5]
    with pytest.raises(UserError, match=r"multiple of padded\(\) is 0; it must be a number of tokens above 0"):
        padded(multiple=0)


def test_targets_that_are_numbers_are_put_together():
    inputs, targets = padded()([(sequence(2), 3), (sequence(1), torch.tensor(5))])
    assert inputs.tolist() == [[1, 2], [1, 0]] and targets.tolist() == [3, 5]


def test_the_count_of_a_loss_is_that_of_real_targets_however_samples_are_put_together():
    collate, scores = padded(), torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    samples = [(sequence(length), sequence(length) % 12) for length in (1, 5, 2, 9)]

    def loss(part: list) -> tuple[float, float]:
        inputs, targets = collate(part)
        found = token_cross_entropy(scores[inputs], targets)
        return float(found.total), float(found.count)

    (whole, count), (first, first_count), (rest, rest_count) = loss(samples), loss(samples[:1]), loss(samples[1:])
    assert count == 17 == first_count + rest_count and whole == pytest.approx(first + rest, rel=1e-5)


def test_what_cannot_be_filled_up_is_refused():
    with pytest.raises(UserError, match=r"needs inputs that are a dict"):
        padded(mask="real")([(sequence(2), sequence(2))])
    with pytest.raises(UserError, match=r"given inputs of shape \(2, 2\); it fills up sequences of one dimension"):
        padded()([(torch.zeros(2, 2), sequence(2))])


def test_a_reader_can_be_given_it():
    assert pickle.loads(pickle.dumps(padded(mask="real"))) == padded(mask="real")
