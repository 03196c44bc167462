"""A dataset that draws from Python's, NumPy's or torch's global generator gives the same samples on every mesh."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from meshrun import ImageFolder, Table
from meshrun.data import seeding
from meshrun.data.loader import Loader, Reading, evaluation_batches, is_decoded, is_for_a_thread
from meshrun.data.order import Cut, Order
from meshrun.data.samples import Samples, Wanted, may_draw
from meshrun.data.together import coming
from tests.data.test_image_folder import written
from tests.data.test_together import Way

LENGTH, BATCH = 23, 8


class Noisy:
    """Sample i is (noise, i): `draw` takes the noise from a global generator, for every `every`-th sample."""

    def __init__(self, kind: str = "all", every: int = 1) -> None:
        self.kind, self.every = kind, every

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.zeros(3, dtype=torch.float64)
        if index % self.every == 0:
            if self.kind in ("python", "all"):
                noise[0] = random.gauss(0, 1)
            if self.kind in ("numpy", "all"):
                noise[1] = np.random.randn()
            if self.kind in ("torch", "all"):
                noise[2] = torch.randn((), dtype=torch.float64)
        return noise, torch.tensor(index)


def test_numpy_s_numbers_are_others_for_each_of_many_samples():
    def first(sample: int) -> int:
        seeding.seed_for(0, 0, sample)
        return int(np.random.randint(1 << 62))

    with seeding.put_back():
        assert len({first(sample) for sample in range(1000)}) == 1000


class NoisyMany(Noisy):
    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self[number] for number in ids]


class NoisyManyOnly(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [Noisy()[number] for number in ids]


class NoisyWhole(Noisy):
    def batch_of(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.from_numpy(np.random.randn(len(ids), 3))
        return noise, torch.tensor(ids)


def read(
    data: Noisy | NoisyManyOnly, parts: int = 1, start: int = 0, **reading: object
) -> dict[tuple[int, int], list[float]]:
    """(step, sample) -> its noise, as the ranks of `parts` replicas have read it in two epochs."""
    order, found = Order(LENGTH, BATCH, seed=7), {}
    for part in range(parts):
        for step in Loader(data, order, part, parts, Reading(seed=7, **reading)).steps(start, 6):
            for noise, index in step.batches:
                found |= {(step.step, int(i)): row.tolist() for i, row in zip(index, noise, strict=True)}
    return found


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_samples_are_the_same_on_every_mesh_with_any_readers_and_after_a_resume(kind: str):
    random.seed(), np.random.seed(), torch.seed()
    whole = read(Noisy(kind))
    column = ["python", "numpy", "torch"].index(kind)
    values = [row[column] for row in whole.values()]
    assert len(set(values)) == 2 * LENGTH, "every sample draws for itself, and otherwise in the next epoch"
    assert read(Noisy(kind), parts=3) == whole
    assert read(Noisy(kind), cut=Cut(micro=2)) == whole
    assert read(Noisy(kind), workers=2) == whole
    assert read(Noisy(kind), start=4) == {key: row for key, row in whole.items() if key[0] >= 4}


def test_seeds_epochs_and_samples_have_words_of_their_own():
    places = [
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 1),
        (1, 0, 1),
        (0, None, 1),
        (0, 0, [1, 2]),
        (0, 11, 2),
        (0, 1, 12),
        (1, 1, 2),
    ]
    assert len({seeding.word_for(*place) for place in places}) == len(places)


@pytest.mark.parametrize("kind", [NoisyMany, NoisyManyOnly, NoisyWhole])
def test_batches_that_are_drawn_as_a_whole_are_read_by_sample(kind: type[Noisy | NoisyManyOnly]):
    assert read(kind()) == read(Noisy()) == read(kind(), parts=3)


def test_a_dataset_that_seldom_draws_is_seeded_from_its_first_draw_on():
    whole = read(Noisy(every=11))
    assert sum(any(row) for row in whole.values()) == 6
    assert read(Noisy(every=11), parts=3) == read(Noisy(every=11), parts=2, workers=2) == whole


def test_evaluation_draws_the_same_every_time_and_apart_from_the_training():
    def evaluated(parts: int) -> dict[int, list[float]]:
        batches = [b for part in range(parts) for b in evaluation_batches(Noisy(), part, parts, 4, Reading(seed=7))]
        return {int(i): row.tolist() for b in batches for row, i in zip(*b.batch, strict=True)}

    assert evaluated(1) == evaluated(3)
    training = read(Noisy())
    assert all(row != training[step, number] for number, row in evaluated(1).items() for step in (0, 1, 2)
               if (step, number) in training)  # fmt: skip


def test_the_generators_of_the_program_go_on_as_if_nothing_was_read():
    def drawn() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()

    for samples in (Samples(Noisy()), Samples(Noisy(every=100))):
        for _ in range(2):
            random.seed(3), np.random.seed(3), torch.manual_seed(3)
            alone = drawn()
            random.seed(3), np.random.seed(3), torch.manual_seed(3)
            samples[Wanted([1, 2, 0], 3, epoch=0)]
            assert drawn() == alone


def test_the_generators_go_on_as_before_also_after_an_error():
    before = seeding.snapshot()
    with pytest.raises(KeyError), seeding.put_back():
        seeding.seed_for(0, 0, 1)
        raise KeyError
    assert before.same(seeding.snapshot())


def test_the_three_generators_do_not_draw_alike():
    with seeding.put_back():
        seeding.seed_for(0, 0, 1)
        assert abs(random.random() - np.random.rand()) > 1e-6


def test_a_random_collate_function_draws_by_its_batch_with_any_readers():
    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(len(samples), 3), torch.stack([index for _, index in samples])

    quiet = Noisy("none")
    assert read(quiet, collate=collate) == read(quiet, collate=collate, workers=2)


def test_an_error_comes_from_the_sample_that_its_seed_spoils():
    class Spoiled(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if random.random() < 0.2:
                raise ValueError("spoiled")
            return super().__getitem__(index)

    runs = [Samples(Spoiled(), skip_bad=True, seed=1)[Wanted(ids, len(ids), epoch=0)].bad
            for ids in (list(range(LENGTH)), list(range(LENGTH))[::-1])]  # fmt: skip
    assert runs[0] and sorted(runs[0]) == sorted(runs[1])


class Slow(Noisy):
    """Takes so long that a model draws meanwhile."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.004)
        return super().__getitem__(index)


class SlowAndStill(Slow):
    draws = False


def drawn_beside(data: Slow, lane: Way | None) -> tuple[list[object], list[list[float]]]:
    """What a model draws that computes as long as a batch takes to be read, and what the data has drawn."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    own, noise = [], []
    loader = Loader(data, Order(LENGTH, BATCH, seed=7), 0, 1, Reading(seed=7))
    with contextlib.closing(coming(loader, 0, 6, lane, lambda _step, inputs, _ids: inputs)) as steps:
        for step in steps:
            for _ in range(8):
                own.append((random.gauss(0, 1), np.random.randn(), torch.rand(()).item()))
                time.sleep(0.004)
            noise += step.batches[0][0].tolist()
    return own, noise


@pytest.mark.parametrize("data", [Slow("all"), SlowAndStill("none")], ids=["draws", "draws nothing"])
def test_beside_a_device_model_and_data_draw_what_they_draw_alone(data: Slow):
    assert drawn_beside(data, Way()) == drawn_beside(data, None)


class Augmented(ImageFolder):
    pass


class Shifted(TensorDataset):
    pass


def test_only_what_says_so_of_itself_is_left_to_a_thread(tmp_path: Path):
    written(tmp_path / "pictures", "a/1.png")
    (tmp_path / "rows.csv").write_text("x\n1\n")
    rows = torch.zeros(2)
    folder, table = tmp_path / "pictures", tmp_path / "rows.csv"
    still = [TensorDataset(rows), [rows], rows, ImageFolder(folder, 8), Table(table), SlowAndStill("none")]
    assert not any(may_draw(each, None) for each in still)
    assert all(may_draw(each, list) for each in still), "a collate function is the user's"
    moved = [Shifted(rows), Augmented(folder, 8), Table(table, transform=dict), Slow("all"), Subset(still[0], [0])]
    assert all(may_draw(each, None) for each in moved)
    assert [is_for_a_thread(Slow("all"), Reading(workers=count)) for count in (0, 1)] == [False, True]


def test_what_is_decoded_and_may_draw_stays_with_readers():
    class Decoded(Noisy):
        decoded = True

    class Still(Decoded):
        draws = False

    assert is_decoded(Still("none"), Reading()) and not is_decoded(Decoded("all"), Reading())
    assert not is_decoded(Still("none"), Reading(collate=list))


def test_a_collate_function_that_draws_goes_by_its_batch_epoch_and_seed():
    def noisy(samples: list[int]) -> torch.Tensor:
        return torch.rand(len(samples))

    def drawn(ids: list[int], epoch: int, seed: int = 3) -> list[float]:
        torch.rand(5)  # the program draws in between
        samples = Samples(list(range(8)), noisy, seed=seed)
        return samples[Wanted(ids, len(ids), epoch=epoch)].batch.tolist()

    first = drawn([0, 1], 0)
    assert drawn([0, 1], 0) == first
    assert first not in (drawn([0, 1], 1), drawn([0, 1], 0, seed=4), drawn([1, 0], 0))
    assert first != drawn([2, 1], 0), "all of its samples decide, and not the one that was read last"


def test_the_seed_of_a_reading_is_what_its_samples_draw_by():
    class Noisy(list[float]):
        def __getitem__(self, number: Any) -> Any:
            return torch.rand(()), torch.zeros(())

    def drawn(seed: int) -> list[float]:
        steps = Loader(Noisy([0.0] * 4), Order(4, 4, 0), 0, 1, Reading(seed=seed)).steps(0, 1)
        return [value for data in steps for value in data.batches[0][0].tolist()]

    assert drawn(1) == drawn(1) and not set(drawn(1)) & set(drawn(2))
