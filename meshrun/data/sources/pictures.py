"""From the bytes of an image file to a square of pixels: decoded, turned upright, in three colours, cut to size.

    pixels = torch.empty(3, 224, 224, dtype=torch.uint8)
    decode(Path("cat.jpg").read_bytes(), pixels)       # ValueError with the reason if that cannot be

The shorter side becomes the size, of the longer one the middle is taken. Nothing here is random, so that what comes out
can be kept. A large JPEG is decoded at a half, a quarter or an eighth of its scale where that is still enough, and
torch resizes: the same weights as Pillow's, in a quarter of the time.
"""

from __future__ import annotations

import functools
import importlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from meshrun.data.sources.source import is_bomb
from meshrun.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"})
"""What names of image files end in."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What is decoded: Pillow knows many others, and runs a program for one of them."""
LARGEST_SIDE = 1 << 14
"""Pixels of a side beyond which a size is a slip of the pen."""
_BAND = 1 << 20
"""Pixels that are brought to three colours at a time: as a whole, a large picture would take its memory three times."""
_ORIENTATION = 0x0112
_PER_PIXEL = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes of a pixel in Pillow's memory; 4 of all others."""
_TIMES = {"WEBP": 4, "TIFF": 2}
"""How often the pixels are in memory while libraries decode: a frame, its canvas, the one before, and as bytes."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_MIRRORED, _TURNED = (2, 4, 5, 7), {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}
"""Of the eight orientations of a camera: which are to be mirrored first, and then turned left by how many quarters."""


def decode(data: bytes, into: Tensor) -> None:
    """Writes the picture to a (3, size, size) tensor of bytes."""
    size = into.shape[-1]
    try:
        image = _opened(data, size)
        orientation = image.getexif().get(_ORIENTATION, 1) if "exif" in image.info else 1
        square = _square(image, size)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(_reason(error, data)) from None
    into.copy_(_upright(square, orientation) if orientation in range(2, 9) else square)


def _opened(data: bytes, size: int) -> Image:
    """The picture, at least `size` high and wide if it ever was, before its pixels take memory."""
    image = _pillow().open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if image.format == "JPEG":
        scale = size / min(image.size)
        image.draft("RGB" if image.mode != "L" else "L", tuple(int(np.ceil(side * scale)) for side in image.size))
    # Pillow has a pointer to each row, and its decoders have two rows beside those of the picture.
    pixel = _PER_PIXEL.get(image.mode, 4)
    row, pixels = image.width * pixel, width * height * pixel
    taken = (row * (image.height + 2) + 8 * image.height) * _TIMES.get(image.format or "", 1)
    if image.format == "JPEG" and image.info.get("progressive"):  # all of its coefficients are kept, of two bytes
        taken += 2 * width * height * image.layers
    if is_bomb(pixels, taken, len(data)):
        raise ValueError(
            f"its header says {width:,} x {height:,} pixels, which take {taken:,} bytes of memory; that is too much "
            f"for a file of {len(data):,} bytes"
        )
    return image


def _square(image: Image, size: int) -> Tensor:
    """The middle of the picture, (3, size, size): its red, green and blue."""
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    many = min(short, max(1, _BAND // short))
    _allow_reading_only()
    bands = []
    for start in range(top, top + short, many):
        rows = min(many, top + short - start)
        band = _coloured(image.crop((left, start, left + short, start + rows)))
        # With a fourth byte, as Pillow has them in memory: copying them is cheaper than packing three.
        pixels = np.frombuffer(band.tobytes("raw", "RGBX"), dtype=np.uint8).reshape(rows, short, 4)
        bands.append(_resized(torch.from_numpy(pixels).permute(2, 0, 1), size if many == short else rows, size))
    # torch makes each row narrower before it makes columns shorter, so that bands give the same as the whole.
    return _resized(torch.cat(bands, 1), size, size)[:3]


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if tuple(pixels.shape[1:]) == (height, width):
        return pixels
    return functional.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]


def _coloured(image: Image) -> Image:
    if image.mode == "RGB":
        return image
    if image.mode in _SIXTEEN_BITS:
        # Pillow would cut off all above 255 and leave a white picture.
        eight = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return _pillow().fromarray(eight).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are fractions, and nothing says which of them is white")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _upright(square: Tensor, orientation: int) -> Tensor:
    if orientation in _MIRRORED:
        square = square.flip(2)
    return torch.rot90(square, _TURNED.get(orientation, 0), (1, 2))


def _reason(error: Exception, data: bytes) -> str:
    """Pillow's many errors in the words of somebody who looks at the file."""
    text = str(error).strip() or type(error).__name__
    if not data:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return f"its {len(data)} bytes are no image that Pillow knows"
    if type(error).__name__ == "DecompressionBombError":
        return f"the picture is too large ({text.split(',')[0].lower()})"
    return f"it is broken ({text.rstrip('.')})" if "truncated" not in text else f"it is truncated ({text})"


@functools.cache
def _allow_reading_only() -> None:
    """torch warns once a process that writing to such memory would be wrong; nobody writes to it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"0", dtype=np.uint8))


@functools.cache
def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise UserError("images are decoded by Pillow, which is not installed; pip install 'meshrun[images]'") from None
