"""Changes of pictures at random, on the device that computes them, a whole batch at a time.

    def augment(images, draws):
        return random_flip(random_crop(images, 224, draws), draws)

    Experiment(…, augment=augment)

Images are (N, C, H, W), of bytes or of floats; what comes out is of the same type, bytes rounded. Which picture is
changed how depends on `draws` alone, so the same sample is changed alike on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun.errors import UserError
from meshrun.experiment import Draws

_RATIOS = (3 / 4, 4 / 3)
"""Width to height of what is cut out: what everybody takes."""


def random_flip(images: Tensor, draws: Draws) -> Tensor:
    """Each picture, or its mirror image with the sides exchanged."""
    _check("random_flip", images)
    turned = _drawn(draws, 1) < 0.5
    if not turned.is_cuda and len(turned) == 1:
        return images.flip(-1) if turned else images
    return torch.where(_sent(turned, images)[:, :, None, None], images.flip(-1), images)


def random_crop(images: Tensor, size: int, draws: Draws, scale: tuple[float, float] = (0.35, 1.0)) -> Tensor:
    """A part of each picture, of a share of its area within `scale`, brought to `size` times `size`.

    Its place, its share and its shape are drawn; it is never outside the picture. Values between pixels are
    interpolated in two directions.
    """
    _check("random_crop", images)
    if not 0 < scale[0] <= scale[1] <= 1:
        raise UserError(f"random_crop(scale={scale}) must be two shares of the area, the smaller one first, up to 1")
    height, width = images.shape[-2:]
    share, shape, across, down = _drawn(draws, 4).unbind(1)
    area = height * width * (scale[0] + share * (scale[1] - scale[0]))
    least, most = (math.log(each) for each in _RATIOS)
    ratio = torch.exp(least + shape * (most - least))
    # As shares of the picture's sides; a part that would be too wide or too high is as wide or high as the picture.
    wide = (torch.sqrt(area * ratio) / width).clamp(max=1.0)
    high = (torch.sqrt(area / ratio) / height).clamp(max=1.0)
    # Coordinates go from -1 to 1.
    left, top = (2 * across - 1) * (1 - wide), (2 * down - 1) * (1 - high)
    pixels = images if images.is_floating_point() else images.float()
    wide, high, left, top = _sent(torch.stack([wide, high, left, top]), pixels)[:, :, None].to(pixels.dtype).unbind()
    middles = torch.linspace(1 / size - 1, 1 - 1 / size, size, dtype=pixels.dtype, device=pixels.device)
    x, y = torch.addcmul(left, wide, middles), torch.addcmul(top, high, middles)
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], -1)
    found = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return found if images.is_floating_point() else found.round_().to(images.dtype)


def _drawn(draws: Draws, count: int) -> Tensor:
    """Numbers of each sample, on the host if they can be had there: a kernel for each operation on them costs more."""
    on_host: Callable[[int], Tensor] = getattr(draws, "on_host", draws.uniform)
    return on_host(count)


def _sent(numbers: Tensor, images: Tensor) -> Tensor:
    """On the device of the images; the host does not wait for it."""
    return numbers.to(images.device, non_blocking=True)


def _check(name: str, images: Tensor) -> None:
    if not isinstance(images, Tensor):
        raise UserError(f"{name} was given {type(images).__name__}; it needs a tensor of images of shape (N, C, H, W)")
    if images.dim() != 4 or not (images.is_floating_point() or images.dtype == torch.uint8):
        found = f"{images.dtype} of shape {tuple(images.shape)}"
        raise UserError(f"{name} was given {found}; it needs images of bytes or floats of shape (N, C, H, W)")
