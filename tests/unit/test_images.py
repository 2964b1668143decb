"""Images in requests: files and numbers, sizes and channels, and what is refused."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from serve.bundle import ImageInput
from serve.errors import InvalidField, ServeError
from serve.inputs.images import (
    MAX_PIXELS,
    PixelCount,
    _check_coding,
    _decoded_bytes,
    _scans,
    read_image,
)
from serve.runtime.protocol import FloatArray

GREY = np.random.default_rng(0).integers(0, 256, (6, 5), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def spec(channels: int = 1, height: int = 6, width: int = 5) -> ImageInput:
    return ImageInput(
        channels=channels, height=height, width=width, mean=(0.0,) * channels, std=(1.0,) * channels
    )


def read(value: object, wanted: ImageInput | None = None) -> FloatArray:
    return read_image(value, wanted or spec(), PixelCount(), "input.image")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return base64.b64encode(stream.getvalue()).decode()


def test_a_file_and_its_numbers_are_the_same_image() -> None:
    expected = GREY.astype(np.float32)[None] / 255
    file = encoded(Image.fromarray(GREY))
    for value in (
        file,
        f"data:image/png;base64,{file}",
        "\n".join(file[at : at + 20] for at in range(0, len(file), 20)),
        GREY.tolist(),
        GREY[:, :, None].tolist(),
        encoded(Image.fromarray(GREY), "BMP"),
        encoded(Image.fromarray(GREY), "WEBP", lossless=True),
        encoded(Image.fromarray(GREY.astype(np.uint16) * 257)),
    ):
        assert np.array_equal(read(value), expected)
    np.testing.assert_allclose(read((GREY / 255).tolist()), expected, atol=1e-7)
    assert np.abs(read(encoded(Image.fromarray(COLOUR), "JPEG", quality=95), spec(3))).max() <= 1


def test_pixels_are_normalised_channel_by_channel() -> None:
    wanted = ImageInput(channels=3, height=6, width=5, mean=(0.5, 0.25, 0), std=(0.5, 1, 2))
    pixels = read(COLOUR.tolist(), wanted)
    expected = (COLOUR / 255 - [0.5, 0.25, 0]) / [0.5, 1, 2]
    np.testing.assert_allclose(pixels, expected.transpose(2, 0, 1), atol=1e-6)
    assert pixels.dtype == np.float32 and pixels.flags.c_contiguous


@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
@pytest.mark.parametrize("given", [1, 2, 3, 4])
def test_channels_are_converted_the_same_way_whatever_was_sent(given: int, wanted: int) -> None:
    values = np.random.default_rng(2).integers(0, 256, (6, 5, given), dtype=np.uint8)
    whole = read(values.tolist(), spec(wanted))
    assert whole.shape == (wanted, 6, 5)
    np.testing.assert_allclose(read((values / 255).tolist(), spec(wanted)), whole, atol=3e-3)
    file = encoded(Image.fromarray(values[:, :, 0] if given == 1 else values))
    assert np.array_equal(read(file, spec(wanted)), whole)


def test_a_smaller_image_is_an_average_and_not_a_sample() -> None:
    board = np.indices((64, 64)).sum(axis=0) % 2 * 255
    for value in (board.tolist(), (board / 255).tolist()):
        assert np.abs(read(value, spec(1, 8, 8)) - 0.5).max() < 0.01
    assert read(np.full((2, 3), 51).tolist(), spec(1, 8, 8)) == pytest.approx(0.2)


def test_palettes_two_colours_and_turned_photographs() -> None:
    palette = Image.fromarray(COLOUR).convert("P")
    assert read(encoded(palette), spec(3)).shape == (3, 6, 5)
    assert read(encoded(Image.fromarray(GREY).convert("1")), spec(1)).max() == 1.0
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    file = encoded(Image.fromarray(GREY), "PNG", exif=turned)
    assert np.array_equal(read(file)[0], np.rot90(GREY.astype(np.float32), 2) / np.float32(255))
    deep = Image.fromarray(GREY.astype(np.uint16) * 257)  # 16 bits of grey
    assert np.array_equal(read(encoded(deep, "PNG", exif=turned)), read(file))


def test_the_place_of_what_is_wrong_is_that_in_the_image() -> None:
    with pytest.raises(InvalidField, match=r"input\.image\[1\]\[1\] is no list"):
        read([[[0], [1]], [[1], 2]], spec(1))
    with pytest.raises(InvalidField, match=r"input\.image\[1\]\[0\] has 2 numbers"):
        read([[[0], [1]], [[1, 2], [2]]], spec(1))
    with pytest.raises(InvalidField, match="holds something that is no number"):
        read([[np.float64(0.5)]], spec(1))


def bomb(width: int, height: int) -> str:
    """A PNG whose header declares this size, with hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


SVG = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()
REFUSED: list[tuple[str, object, str]] = [
    ("a bomb", bomb(50_000, 50_000), "has 50000 x 50000 pixels"),
    ("a broken file", bomb(100, 100), "is a broken image"),
    ("half a file", encoded(Image.fromarray(COLOUR), "JPEG")[:400], "is "),
    ("another format", SVG, "is no image of a format"),
    ("a TIFF", encoded(Image.fromarray(GREY), "TIFF"), "is no image of a format"),
    ("no base64", "not base64!", "is no base64"),
    ("nothing", "", "is no image"),
    ("another URL", "data:text/html;base64,aGk=", "is a data: URL of no base64 image"),
    ("an address", "https://example.org/cat.png", "is no base64"),
    ("a number", 7, "is no image: send"),
    ("null", None, "is no image: send"),
    ("an empty list", [], "is an empty list"),
    ("an empty row", [[]], "is an empty list"),
    ("one row", [1, 2, 3], "input.image[0] is no list"),
    ("ragged rows", [[1, 2], [3]], "input.image[1] has 1 numbers, but the first has 2"),
    ("ragged pixels", [[[1], [2]], [[3]]], "input.image[1] has 1 pixels"),
    ("ragged channels", [[[1, 2], [2]]], "has 1 numbers, but the first has 2"),
    ("too many channels", [[[1] * 5]], "has 5 numbers a pixel"),
    ("too deep", [[[[1]]]], "holds a list"),
    ("text within", [[1, "2"]], "holds text"),
    ("true within", [[0, True]], "holds true or false"),
    ("null within", [[0.5, None]], "holds null"),
    ("an object within", [[{}]], "holds an object"),
    ("a mixture", [[1, [2]]], "holds a list"),
    ("too bright", [[0, 256]], "has the value 256: send integers from 0 to 255"),
    ("negative", [[0, -1]], "has the value -1"),
    ("neither", [[0.5, 200]], "has the value 200"),
    ("not finite", [[float("nan"), 0.5]], "not finite"),
    ("infinite", [[float("inf"), 0.5]], "not finite"),
    ("enormous", [[10**400]], "not finite"),
]


@pytest.mark.parametrize(
    ("value", "says"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_what_is_no_image_is_refused(value: object, says: str) -> None:
    with pytest.raises(ServeError) as refusal:
        read(value)
    assert refusal.value.status == 422 and says in refusal.value.message, refusal.value.message
    assert "send" in refusal.value.message or "make all" in refusal.value.message
    assert (refusal.value.param or "").startswith("input.image")


def test_many_images_may_not_cost_more_than_a_few() -> None:
    count = PixelCount()
    for _ in range(2):
        count.spend(MAX_PIXELS, 1, "input[0].image")
    with pytest.raises(ServeError, match="more than 33554432 pixels together"):
        count.spend(1, 1, "input[2].image")


def noise(height: int, width: int, channels: int = 3) -> Image.Image:
    small = np.random.default_rng(3).integers(0, 256, (17, 13, channels), dtype=np.uint8)
    return Image.fromarray(small.squeeze()).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
def test_large_images_that_are_made_smaller_in_strips_look_the_same(
    kind: str, channels: int, turn: int
) -> None:
    image, wanted = noise(1003, 1511, channels), spec(channels, 24, 36)
    exif = Image.Exif()
    exif[0x0112] = turn
    options: dict[str, Any] = {} if kind == "BMP" else {"exif": exif}
    upright = ImageOps.exif_transpose(image)
    if kind != "BMP":
        image.getexif()[0x0112] = turn
        upright = ImageOps.exif_transpose(image)
    expected = np.asarray(upright.resize((36, 24), Image.Resampling.BILINEAR), np.float32) / 255
    found = read(encoded(image, kind, **options), wanted).transpose(1, 2, 0)
    assert np.abs(found - expected.reshape(found.shape)).max() < 0.04
    assert np.abs(found - expected.reshape(found.shape)).mean() < 0.005


@pytest.mark.parametrize("mode", ["P", "LA", "RGBA", "1"])
def test_large_images_of_other_modes_are_those_of_their_parts(mode: str) -> None:
    image = noise(900, 900).convert(mode)
    plain = np.asarray(image.convert("RGB").resize((20, 20), Image.Resampling.BILINEAR), np.float32)
    found = read(encoded(image), spec(3, 20, 20)).transpose(1, 2, 0)
    assert np.abs(found - plain / 255).max() < 0.06


def test_sixteen_bits_become_eight_as_they_did() -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = read(encoded(Image.fromarray(deep)), spec(1, 256, 256))[0] * 255
    assert np.array_equal(found.round(), np.clip(deep / 257, 0, 255).round())


def test_what_an_image_takes_while_it_is_decoded_is_limited() -> None:
    count = PixelCount(10**9)
    count.spend(2048, 2048, "input.image", 2048 * 2048 * 4)
    with pytest.raises(ServeError, match="at most 4194304 of its kind are decoded") as refused:
        count.spend(2048, 2049, "input.image", 2048 * 2049 * 4)
    assert refused.value.details["max_pixels"] == 2**22


def jpeg(side: int = 64, **options: Any) -> bytes:
    grey = np.add.outer(np.arange(side), np.arange(side)).astype(np.uint8)
    return base64.b64decode(encoded(Image.fromarray(grey), "JPEG", **options))


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    whole = jpeg(progressive=True)
    last = whole.rindex(b"\xff\xda")
    bomb = whole[:-2] + whole[last:-2] * 100 + whole[-2:]
    with pytest.raises(ServeError, match="a JPEG of more than 64 scans: save it again"):
        read(base64.b64encode(bomb).decode())
    assert read(base64.b64encode(whole).decode()).shape == (1, 6, 5)


def test_scans_are_counted_and_those_of_a_thumbnail_are_not() -> None:
    progressive = jpeg(progressive=True)
    assert _scans(progressive) == progressive.count(b"\xff\xda") > 1
    assert _scans(jpeg(exif=b"Exif\0\0" + progressive)) == 1
    assert _scans(jpeg(restart_marker_blocks=1)) == 1
    assert _scans(jpeg() + bytes(9) + progressive[2:]) == 1  # a second picture, which is not read
    assert _scans(b"") == _scans(b"\xff\xd8\xff") == 0


def test_a_jpeg_of_several_scans_takes_the_memory_of_its_coefficients() -> None:
    for options, more in (({}, 0), ({"progressive": True}, 2 * 64 * 64)):
        data = jpeg(**options)
        with Image.open(io.BytesIO(data)) as image:
            image.info.pop("progressive", None), image.info.pop("progression", None)
            _check_coding(image, data, "input.image")
            assert _decoded_bytes(image, *image.size) == 64 * 64 + more


def test_run_lengths_of_bmp_are_refused() -> None:
    palette = bytes(range(256)) * 4
    header = struct.pack("<IiiHHIIiiII", 40, 4096, 1, 1, 8, 1, 4, 0, 0, 256, 0)
    start = 14 + len(header) + len(palette)
    data = struct.pack("<2sIHHI", b"BM", start + 4, 0, 0, start) + header + palette
    with pytest.raises(ServeError, match="a BMP with run lengths: send it without, or as PNG"):
        read(base64.b64encode(data + b"\x01\x01\x00\x00").decode())
