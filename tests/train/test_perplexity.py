"""Perplexity: the exponential of the mean over all tokens of a set, and not the mean of anything else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from meshrun import mesh, perplexity, token_cross_entropy
from meshrun.experiment import Metric
from meshrun.parallel.vocabulary import takes_split
from meshrun.train.evaluate import _finished
from meshrun.train.loop import Trainer
from tests.programs import small_llama


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.ranks(2)) for each in ("dp=2", "tp=2")], ids=["dp=2", "tp=2"]
)
def test_perplexity_is_the_exponential_of_the_mean_token_loss_on_every_mesh(layout: str):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    experiment = replace(small_llama.experiment(), metrics={"perplexity": perplexity}, micro=2)
    scores = Trainer(experiment, mesh.start()).evaluate()["val"]
    assert scores["count"] < 9 * 8, "some tokens must not count"
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-6)
    assert 20 < scores["perplexity"] < 60, "an untrained model is about as unsure as of all 32 tokens"


def test_the_perplexity_of_equal_logits_is_the_size_of_the_vocabulary():
    loss = perplexity(torch.zeros(2, 3, 17), torch.tensor([[0, 1, 2], [3, 4, -100]]))
    assert perplexity.then(float(loss.total) / float(loss.count)) == pytest.approx(17)


def test_a_loss_beyond_all_numbers_is_an_endless_perplexity_whoever_computes_it():
    assert perplexity.then(1e6) == math.inf
    assert _finished("perplexity", Metric(token_cross_entropy, math.exp), 1e6) == math.inf
    assert math.isnan(perplexity.then(math.nan))


def test_logits_stay_split_over_the_vocabulary_where_perplexity_is_measured():
    assert takes_split(perplexity) and takes_split(token_cross_entropy)
    assert not takes_split(Metric(token_cross_entropy, math.sqrt))
