"""Pictures that are changed at random: only as they may be, and each by its own draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshrun import UserError, random_crop, random_flip
from meshrun.data.draws import SampleDraws

CPU = torch.device("cpu")


def draws(count: int, first: int = 0) -> SampleDraws:
    return SampleDraws(0, 0, range(first, first + count), CPU)


class Fixed:
    """Draws that a test has chosen."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = rows

    def uniform(self, count: int = 1) -> Tensor:
        return torch.tensor(self.rows)[:, :count]


def pictures(count: int, height: int = 24, width: int = 32) -> Tensor:
    return torch.randint(
        0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_about_half_of_the_pictures_are_mirrored_and_the_others_left_alone():
    images = pictures(200)
    found = random_flip(images, draws(200))
    mirrored = (found == images.flip(-1)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(found == images).flatten(1).all(1)) and 70 < mirrored.sum() < 130
    assert found.dtype == torch.uint8


def test_a_picture_is_changed_alike_in_any_company():
    images = pictures(6)
    whole = random_flip(random_crop(images, 16, (d := draws(6))), d)
    for first, last in ((0, 2), (2, 6)):
        part = random_flip(random_crop(images[first:last], 16, (d := draws(last - first, first))), d)
        assert torch.equal(whole[first:last], part)


def test_a_crop_is_a_part_of_the_picture():
    """In a picture of coordinates the corners of a crop say where it was."""
    down, across = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    images = torch.stack([down, across]).expand(300, 2, 48, 64)
    found = random_crop(images, 32, draws(300), scale=(0.2, 0.6))
    heights = (found[:, 0, -1, 0] - found[:, 0, 0, 0]) * 32 / 31
    widths = (found[:, 1, 0, -1] - found[:, 1, 0, 0]) * 32 / 31
    areas, ratios = heights * widths / (48 * 64), widths / heights
    inside = (heights < 47) & (widths < 63)  # where it was not cut down to the picture
    assert areas[inside].min() > 0.19 and areas.max() < 0.61 and areas.std() > 0.08
    assert ratios[inside].min() > 0.72 and ratios[inside].max() < 1.37
    assert found[:, 0].min() >= 0 and found[:, 0].max() <= 47 and found[:, 1].max() <= 63
    lefts = found[:, 1, 0, 0]
    assert lefts.min() < 3 and lefts.max() > 20


def test_a_crop_of_all_of_a_square_is_the_picture():
    images = pictures(1, 16, 16)
    whole = Fixed([1.0, 0.5, 0.3, 0.7])  # all of its area, as wide as high
    assert torch.equal(random_crop(images, 16, whole), images)
    assert torch.allclose(random_crop(images.float(), 16, whole), images.float(), atol=1e-2)


def test_bytes_come_out_as_bytes_and_floats_as_floats():
    images = pictures(4)
    as_bytes, as_floats = random_crop(images, 20, draws(4)), random_crop(images.float(), 20, draws(4))
    assert as_bytes.dtype == torch.uint8 and as_bytes.shape == (4, 3, 20, 20) and as_floats.dtype == torch.float32
    assert (as_bytes.float() - as_floats).abs().max() <= 0.5


def test_what_are_no_pictures_is_refused():
    with pytest.raises(UserError, match=r"random_flip was given torch\.int64 of shape \(2, 3, 4, 4\); it needs images"):
        random_flip(torch.zeros(2, 3, 4, 4, dtype=torch.int64), draws(2))
    with pytest.raises(UserError, match=r"random_crop was given dict"):
        random_crop({}, 4, draws(2))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"scale=\(0.5, 0.2\)"):
        random_crop(pictures(2), 4, draws(2), scale=(0.5, 0.2))


def test_a_picture_alone_is_mirrored_as_it_is_among_others():
    images = torch.arange(20 * 3 * 4 * 5, dtype=torch.float32).view(20, 3, 4, 5)
    together = random_flip(images, SampleDraws(3, 1, list(range(20)), torch.device("cpu")))
    mirrored = [torch.equal(after, before.flip(-1)) for after, before in zip(together, images, strict=True)]
    assert 0 < sum(mirrored) < 20
    for number, image in enumerate(images):
        alone = random_flip(image[None], SampleDraws(3, 1, [number], torch.device("cpu")))
        assert torch.equal(alone[0], together[number])
