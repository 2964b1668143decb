"""Plain text to train, validate and test on: one text that is divided, or a file of each.

Knows files and characters; not what becomes of them.
"""

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

from train.config import DataConfig
from train.tables import DataError


class Corpus(NamedTuple):
    train: str
    validation: str
    test: str


def divided(text: str, held_out: float) -> Corpus:
    """The last share of a text is held out, to validate and to test on."""
    cutoff = int(len(text) * (1 - held_out))
    return Corpus(text[:cutoff], text[cutoff:], text[cutoff:])


def read_corpus(data: DataConfig) -> Corpus:
    """The files that the recipe names in the folder data.path, or all text there is."""
    path = Path(data.path)
    if not data.path or not path.exists():
        what = f"FOLDER, where {data.train} is" if data.train else "FILE.txt, any plain text"
        missing = f"{data.path} does not exist" if data.path else "this recipe needs a text"
        raise DataError(f"{missing}: pass --data {what}, of 10 kB or more")
    if data.train:
        text = _text(path / data.train)
        held = _text(path / data.validation) if data.validation else ""
        corpus = Corpus(text, held, held) if held else divided(text, data.held_out)
        return corpus._replace(test=_text(path / data.test)) if data.test else corpus
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.txt"), *path.glob("*.txt.gz")])
    if not files:
        raise DataError(f"{path}: no .txt files there")
    return divided("\n".join(map(_text, files)), data.held_out)


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} does not exist: set data.train, validation and test")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Is the file whole?") from None
