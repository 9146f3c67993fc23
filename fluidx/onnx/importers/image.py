"""Import of ImageDecoder, which needs the package Pillow."""

from __future__ import annotations

import io

import numpy as np

from ..import_tables import on_numpy
from ..node import Node

_MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}


@on_numpy("ImageDecoder", pure=True)
def image_decoder(n: Node) -> object:
    """The decoded image. Data that is not an image gives an empty array, as the standard requires."""
    data = n.value(0).tobytes()
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise n.wrong("it needs the package pillow, which is not installed") from None
    wanted = n.attr("pixel_format", "RGB")
    if wanted not in _MODES:
        raise n.wrong(f"pixel_format must be one of {', '.join(_MODES)}, found {wanted!r}")
    try:
        found = np.array(Image.open(io.BytesIO(data)).convert(_MODES[wanted]))
    except (UnidentifiedImageError, OSError, ValueError):
        return np.zeros((0, 0, 1 if wanted == "Grayscale" else 3), np.uint8)
    if wanted == "Grayscale":
        return found[..., None]
    return found[..., ::-1] if wanted == "BGR" else found
