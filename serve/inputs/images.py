"""Images of requests, as the pixels that a model takes.

An image is a base64 file (PNG, JPEG, WebP, GIF or BMP) or nested lists of numbers. Its format, the
size that its header declares and the memory for it are checked before it is decoded. Large images
are shrunk while they are decoded, or strip by strip, so that there is never a second copy of all
pixels.
"""

import base64
import binascii
import io
import re
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from serve.bundle import ImageInput
from serve.errors import InvalidField, Unprocessable
from serve.runtime.protocol import FloatArray

# Lists of numbers from JSON as arrays, strictly checked. Errors name the wrong number.


_NUMBERS = {int, float}
LARGEST = 1e30


def check_list(value: object, param: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else "no list"
        raise InvalidField(f"{param} is {found}: send a list of numbers", param=param)
    return value


def number_rows(
    rows: list[Any], param: str, across: int | None = None
) -> tuple[npt.NDArray[np.float64], bool]:
    """Rows of equally many finite numbers (R, K), and whether all were written as integers.

    Of pixels, `across` says how many of them are a line.
    """
    kinds: set[type] = set()
    for index, row in enumerate(rows):
        place = f"[{index}]" if across is None else "[{}][{}]".format(*divmod(index, across))
        row = check_list(row, f"{param}{place}")
        if len(row) != len(rows[0]):
            raise InvalidField(
                f"{param}{place} has {len(row)} numbers, but the first has {len(rows[0])}: make "
                "all equally long",
                param=param,
            )
        kinds |= set(map(type, row))
    if not kinds <= _NUMBERS:
        raise InvalidField(f"{param} holds {_word(kinds)}: send numbers only", param=param)
    try:
        array = np.array(rows, dtype=np.float64)
    except OverflowError:
        array = np.array([[np.inf]])
    check_finite(array, param)
    return array, float not in kinds


def check_finite(array: npt.NDArray[np.float64], param: str) -> None:
    """InvalidField for a number that is not finite, or absurdly large."""
    if not (np.abs(array) <= LARGEST).all():  # false for NaN too
        raise InvalidField(
            f"{param} holds a number that is not finite, or beyond {LARGEST:g}: send finite "
            "numbers",
            param=param,
        )


def _word(kinds: set[type]) -> str:
    words = {
        str: "text",
        bool: "true or false",
        type(None): "null",
        list: "a list",
        dict: "an object",
    }
    found = next((kind for kind in words if kind in kinds), None)
    return "something that is no number" if found is None else words[found]


# Images.


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**24  # per image, before resizing
MAX_DECODED_BYTES = 2**24  # per image, while decoding
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_WHITESPACE = str.maketrans("", "", " \t\r\n")
_SEND = "send a base64 PNG, JPEG, WebP, GIF or BMP, or nested lists of numbers (height, width)"

# Larger images are shrunk strip by strip to this multiple of the model's size. What is left to
# resize is large enough to give the same result to the eye.
_LARGE_PIXELS = 2**18
_SPARE = 3
_JPEG_SPARE = 8  # this multiple for JPEG, which shrinks in coarser steps
_STRIP_PIXELS = 2**18
# Bytes per pixel while decoding. libwebp has the file as RGBA, and Pillow makes copies of that.
_WEBP_BYTES = 16
_PLAIN_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
_WORD_BYTES = 4  # all other modes
_COEFFICIENT_BYTES = 2  # JPEG in several scans holds all channels in memory first
# Each scan of a JPEG goes over the whole image; encoders write a dozen at most.
_MAX_SCANS = 64
# A marker of JPEG with a length behind it, among compressed data too.
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
_JPEG_SCAN, _JPEG_END = b"\xda", b"\xd9"

# Pillow's own limit only warns; the limit above refuses, before decoding.
Image.MAX_IMAGE_PIXELS = None
# It warns of each odd tag of a picture, which would be thousands of log lines.
warnings.filterwarnings("ignore", module=r"PIL\.")


class PixelCount:
    """Counts the pixels of a request, so that many images have the limit of one."""

    def __init__(self, limit: int = 2 * MAX_PIXELS) -> None:
        self._limit = self._left = limit

    def spend(self, width: int, height: int, param: str, decoded_bytes: int = 0) -> None:
        """Count an image; Unprocessable if it, or the request, has too many pixels."""
        most = MAX_PIXELS
        if decoded_bytes > MAX_DECODED_BYTES:
            most = min(most, MAX_DECODED_BYTES * width * height // decoded_bytes)
        if width * height > most:
            raise Unprocessable(
                f"{param} has {width} x {height} pixels, but at most {most} of its kind are "
                "decoded: send it smaller",
                param=param,
                max_pixels=most,
            )
        self._left -= width * height
        if self._left < 0:
            raise Unprocessable(
                f"the images up to {param} have more than {self._limit} pixels together: send "
                "fewer at once, or smaller ones",
                param=param,
                max_pixels=self._limit,
            )


def read_image(value: object, spec: ImageInput, count: PixelCount, param: str) -> FloatArray:
    """Pixels (C, H, W) in the size, channels and normalisation of the model."""
    if isinstance(value, str):
        pixels = _of_file(value, spec, count, param)
    elif isinstance(value, list):
        pixels = _of_numbers(value, spec, count, param)
    else:
        raise InvalidField(f"{param} is no image: {_SEND}", param=param)
    return normalised(pixels, spec)


def normalised(pixels: FloatArray, spec: ImageInput) -> FloatArray:
    """Pixels (H, W, C) from 0 to 1, normalised as (C, H, W)."""
    mean = np.array(spec.mean, dtype=np.float32)  # (C,)
    std = np.array(spec.std, dtype=np.float32)
    normal: FloatArray = np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))
    return normal  # (C, H, W)


def _of_file(text: str, spec: ImageInput, count: PixelCount, param: str) -> FloatArray:
    try:
        data = _bytes(text, param)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_coding(image, data, param)
            declared = image.size
            if image.width * image.height > _LARGE_PIXELS:
                # Only JPEG can be decoded at a smaller size; the others ignore this.
                side = _JPEG_SPARE * max(spec.width, spec.height)
                image.draft(None, (side, side))
            count.spend(*declared, param, _decoded_bytes(image, *declared))
            image.load()  # not earlier: reading the orientation of a PNG decodes it
            small = _smaller(image, _wanted(image, spec), MODES[spec.channels])
            return _fitted(ImageOps.exif_transpose(small), spec)
    except UnidentifiedImageError:
        raise Unprocessable(
            f"{param} is no image of a format that is read here: {_SEND}", param=param
        ) from None
    except Unprocessable:
        raise
    except Exception as error:  # decoders raise anything on a broken file
        raise Unprocessable(
            f"{param} is a broken image ({type(error).__name__}): {_SEND}", param=param
        ) from None


def _check_coding(image: Image.Image, data: bytes, param: str) -> None:
    """Unprocessable if a few bytes would take long to decode."""
    if any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())):
        raise Unprocessable(
            f"{param} is a BMP with run lengths: send it without, or as PNG", param=param
        )
    image.info["scans"] = _scans(data) if image.format in ("JPEG", "MPO") else 1
    if image.info["scans"] > _MAX_SCANS:
        raise Unprocessable(
            f"{param} is a JPEG of more than {_MAX_SCANS} scans: save it again, or send it as PNG",
            param=param,
        )


def _scans(data: bytes) -> int:
    """The scans of a JPEG, up to one too many."""
    place, scans = 2, 0
    while scans <= _MAX_SCANS:
        marker = _JPEG_MARKER.search(data, place)
        if marker is None or marker[1] == _JPEG_END:
            break
        scans += marker[1] == _JPEG_SCAN
        place = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2]))
    return scans


def _bytes(text: str, param: str) -> bytes:
    found = _DATA_URL.match(text[:64])
    if text.startswith("data:") and found is None:
        raise Unprocessable(
            f"{param} is a data: URL of no base64 image: send one that begins with "
            "data:image/png;base64,",
            param=param,
        )
    try:
        # Line breaks are common in base64; anything else outside its alphabet is an error.
        plain = text[found.end() if found else 0 :].translate(_WHITESPACE)
        return base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError):
        raise Unprocessable(f"{param} is no base64: {_SEND}", param=param) from None


def _wanted(image: Image.Image, spec: ImageInput) -> tuple[int, int]:
    """Width and height of the model, in the orientation of the image."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return (spec.height, spec.width) if turned else (spec.width, spec.height)


def _decoded_bytes(image: Image.Image, width: int, height: int) -> int:
    """The most memory that decoding an image of this size takes."""
    pixels = image.width * image.height  # less if it is decoded at a smaller size
    if image.format == "WEBP":
        return pixels * _WEBP_BYTES
    plain = pixels * _PLAIN_BYTES.get(image.mode, _WORD_BYTES)
    if "progressive" in image.info or "progression" in image.info or image.info["scans"] > 1:
        return plain + width * height * _COEFFICIENT_BYTES * len(image.getbands())
    return plain


def _smaller(image: Image.Image, wanted: tuple[int, int], mode: str) -> Image.Image:
    """The image with 8 bits per channel; a large one is shrunk."""
    width, height = image.size
    across = max(1, width // (_SPARE * wanted[0]))
    down = max(1, height // (_SPARE * wanted[1]))
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if width * height <= _LARGE_PIXELS or across == down == 1:
        small = _eight_bits(image)
        small.getexif()[ExifTags.Base.Orientation] = orientation
        return small
    small = Image.new(mode, (-(-width // across), -(-height // down)))
    lines = max(1, _STRIP_PIXELS // (width * down)) * down
    for top in range(0, height, lines):
        strip = image.crop((0, top, width, min(height, top + lines)))
        if "transparency" in image.info:
            strip.info["transparency"] = image.info["transparency"]
        small.paste(_eight_bits(strip).convert(mode).reduce((across, down)), (0, top // down))
    # The last strips may reach beyond the image.
    box = (0.0, 0.0, width / across, height / down)
    small = small.resize(wanted, Image.Resampling.BILINEAR, box)
    small.getexif()[ExifTags.Base.Orientation] = orientation
    return small


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image in a mode with 8 bits per channel."""
    if image.mode.startswith(("I", "F")):  # 16 bits of grey
        grey = np.asarray(image)
        # Division by 257, rounded to nearest, in integers.
        nearest = (np.clip(grey, 0, 65535).astype(np.uint32) + 128) // 257
        return Image.fromarray(nearest.astype(np.uint8))
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("P", "PA"):
        clear = image.mode == "PA" or "transparency" in image.info
        return image.convert("RGBA" if clear else "RGB")
    return image if image.mode in MODES.values() else image.convert("RGB")


def _of_numbers(value: list[Any], spec: ImageInput, count: PixelCount, param: str) -> FloatArray:
    pixels, whole = _pixels_of(value, param)  # (H, W, C)
    height, width, channels = pixels.shape
    count.spend(width, height, param)
    low, high = float(pixels.min()), float(pixels.max())
    most = 255 if whole else 1
    if low < 0 or high > most:
        worst = low if low < 0 else high
        raise Unprocessable(
            f"{param} has the value {worst:g}: send integers from 0 to 255, or numbers from 0.0 to "
            "1.0 of which at least one has a decimal point",
            param=param,
        )
    if whole:
        plain = pixels.astype(np.uint8)
        return _fitted(Image.fromarray(plain[:, :, 0] if channels == 1 else plain), spec)
    return _resized(_of_channels(pixels.astype(np.float32), spec.channels), spec)


def _pixels_of(value: list[Any], param: str) -> tuple[npt.NDArray[np.float64], bool]:
    """Nested lists as pixels (H, W, C), and whether all numbers are integers."""
    lines = check_list(value, param)
    deep = isinstance(lines[0], list) and bool(lines[0]) and isinstance(lines[0][0], list)
    if not deep:
        pixels, whole = number_rows(lines, param)
        return pixels[:, :, None], whole
    flat: list[Any] = []
    for index, line in enumerate(lines):
        row = check_list(line, f"{param}[{index}]")
        if len(row) != len(lines[0]):
            raise Unprocessable(
                f"{param}[{index}] has {len(row)} pixels, but the first row has {len(lines[0])}: "
                "make all rows equally long",
                param=param,
            )
        flat += row
    pixels, whole = number_rows(flat, param, len(lines[0]))
    if pixels.shape[1] not in MODES:
        raise Unprocessable(
            f"{param} has {pixels.shape[1]} numbers a pixel: send 1 (grey), 2 (grey, alpha), 3 "
            "(RGB) or 4 (RGB, alpha)",
            param=param,
        )
    return pixels.reshape(len(lines), len(lines[0]), -1), whole


def _fitted(image: Image.Image, spec: ImageInput) -> FloatArray:
    """An image with 8 bits per channel as pixels (H, W, C) from 0 to 1."""
    image = image.convert(MODES[spec.channels])
    if image.size != (spec.width, spec.height):
        # Pillow's bilinear filter averages over the area of a smaller pixel, so it does not alias.
        image = image.resize((spec.width, spec.height), Image.Resampling.BILINEAR)
    pixels: FloatArray = np.asarray(image, dtype=np.float32) / np.float32(255)
    return pixels.reshape(spec.height, spec.width, spec.channels)


def _of_channels(pixels: FloatArray, wanted: int) -> FloatArray:
    """Pixels (H, W, C) with another number of channels, converted as Pillow does."""
    channels = pixels.shape[2]
    if channels == wanted:
        return pixels
    colours, alpha = (pixels, None) if channels % 2 else (pixels[:, :, :-1], pixels[:, :, -1:])
    if wanted < 3 and colours.shape[2] == 3:
        colours = colours @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32)
    elif wanted >= 3 and colours.shape[2] == 1:
        colours = np.repeat(colours, 3, axis=2)
    if wanted % 2:
        return colours
    opaque = np.ones_like(colours[:, :, :1])
    return np.concatenate([colours, opaque if alpha is None else alpha], axis=2)


def _resized(pixels: FloatArray, spec: ImageInput) -> FloatArray:
    """Float pixels (H, W, C) in the model's size."""
    if pixels.shape[:2] == (spec.height, spec.width):
        return pixels
    size = (spec.width, spec.height)
    channels = [
        Image.fromarray(np.ascontiguousarray(pixels[:, :, channel]))
        for channel in range(spec.channels)
    ]
    resized = [channel.resize(size, Image.Resampling.BILINEAR) for channel in channels]
    return np.stack([np.asarray(channel, dtype=np.float32) for channel in resized], axis=2)
