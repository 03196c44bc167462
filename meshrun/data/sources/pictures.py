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

from meshrun.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"})
"""What names of image files end in."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What is decoded: Pillow knows many others, and runs a program for one of them."""
LARGEST_SIDE = 1 << 14
"""Pixels of a side beyond which a size is a slip of the pen."""
LARGE = 64 << 20
"""Bytes of pixels that are read whatever the size of the file."""
MOST_PER_BYTE = 1100
"""Bytes of pixels above that for each byte of the file: deflate, which packs most, makes 1032 of one."""
_ORIENTATION = 0x0112
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_MIRRORED, _TURNED = (2, 4, 5, 7), {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}
"""Of the eight orientations of a camera: which are to be mirrored first, and then turned left by how many quarters."""


def decode(data: bytes, into: Tensor) -> None:
    """Writes the picture to a (3, size, size) tensor of bytes."""
    size = into.shape[-1]
    try:
        pixels, orientation = _pixels(data, size)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(_reason(error, data)) from None
    height, width, _ = pixels.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    _allow_reading_only()
    square = torch.from_numpy(pixels[top : top + short, left : left + short]).permute(2, 0, 1)
    if short != size:
        square = functional.interpolate(square[None], (size, size), mode="bilinear", antialias=True)[0]
    into.copy_(_upright(square[:3], orientation) if orientation != 1 else square[:3])


def _pixels(data: bytes, size: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """The picture's red, green and blue, at least `size` high and wide if it ever was, and how the camera was held."""
    image = _pillow().open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height * 4 > max(LARGE, MOST_PER_BYTE * len(data)):
        raise ValueError(
            f"its header says {image.width:,} x {image.height:,} pixels, which {len(data):,} bytes cannot hold"
        )
    if image.format == "JPEG":
        scale = size / min(image.size)
        image.draft("RGB" if image.mode != "L" else "L", tuple(int(np.ceil(side * scale)) for side in image.size))
    orientation = image.getexif().get(_ORIENTATION, 1) if "exif" in image.info else 1
    # With a fourth byte, as Pillow has them in memory: copying them is cheaper than packing three.
    pixels = np.frombuffer(_coloured(image).tobytes("raw", "RGBX"), dtype=np.uint8)
    return pixels.reshape(image.height, image.width, 4), orientation if orientation in range(1, 9) else 1


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
