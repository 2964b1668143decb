"""The commands `stepdial predict` and `stepdial sample`: a bundle used without a server."""

import argparse
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from serve.bundle import EFFORTS, BundleError, Effort
from serve.errors import ServeError
from stepdial import Options

if TYPE_CHECKING:  # the engine takes a second to load: after the flags are read
    from serve.api.body import TokenLabel
    from serve.local import LocalModel

LONGEST_CELL = 1 << 24
LONGEST_LINE = 1 << 26  # in characters
READ_AT_ONCE = 4096  # rows of a table that are sorted by length together
MAX_TOKENS = 128
# What stands between cells, by how a file is called; "" for a line of JSON each.
_SEPARATORS = {".csv": ",", ".tsv": "\t", ".jsonl": "", ".json": ""}
_STANDARD = Path("-")  # input or output
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # which UTF-8 cannot write


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # SIGTERM, or the end of the terminal, ends it as Ctrl-C does: with nothing left behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as by `nohup`
            signal.signal(number, signal.default_int_handler)
    try:
        status = int(arguments.run(arguments))
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of the other commands
    except (BundleError, ServeError, ValueError, OSError) as error:
        print(f"stepdial {arguments.command}: {_in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser() -> Options:
    parser = Options(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predict = commands.add_parser(
        "predict",
        help="label the rows of a table",
        description="Label the rows of a table with a bundle, without a server.",
    )
    predict.set_defaults(run=_predict)
    predict.add_argument("bundle", type=Path, metavar="BUNDLE")
    predict.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="table to read: .csv, .tsv or .jsonl, plain or as .gz or .xz; -: standard input",
    )
    predict.add_argument(
        "--format",
        choices=[kind.removeprefix(".") for kind in _SEPARATORS],
        help="what --input is (default: as its name ends; of standard input jsonl if it begins "
        "with {, else csv)",
    )
    predict.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the labelled table (default, and -: standard output)",
    )
    predict.add_argument(
        "--text",
        action="append",
        metavar="COLUMN",
        help="column of texts; a number if there is no header (default: as in training, if its "
        "columns had names, else text)",
    )
    sample = commands.add_parser(
        "sample",
        help="continue a prompt",
        description="Continue a prompt, or translate a text, with a bundle and without a server.",
    )
    sample.set_defaults(run=_sample)
    sample.add_argument("bundle", type=Path, metavar="BUNDLE")
    sample.add_argument("--prompt", required=True, metavar="TEXT")
    sample.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="(%(default)s)"
    )
    sample.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the likeliest token"
    )
    sample.add_argument("--top-k", type=int, metavar="K")
    sample.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sample.add_argument("--seed", type=int, metavar="N")
    for each in (predict, sample):
        budget = each.add_mutually_exclusive_group()
        budget.add_argument("--steps", type=int, metavar="N", help="(default: the bundle's)")
        budget.add_argument("--effort", choices=EFFORTS)
        each.add_argument("--threads", type=int, help="threads per call (default: all cores)")
    return parser


def _predict(arguments: argparse.Namespace) -> int:
    from serve.local import LocalModel

    piped = arguments.input == _STANDARD
    name = "standard input" if piped else str(arguments.input)
    with _reading(name):
        standard = _standard_input() if piped else None
        kind = f".{arguments.format}" if arguments.format else _kind(standard or arguments.input)
    separator = _SEPARATORS[kind]
    csv.field_size_limit(LONGEST_CELL)
    output = None if arguments.output == _STANDARD else arguments.output
    if not piped and not arguments.input.exists():
        raise ValueError(f"there is no file {name}")
    if output is not None and _kind(output) != kind:
        raise ValueError(f"--output {output}: end it like --input, {kind}")
    with (
        LocalModel(arguments.bundle, arguments.threads) as model,
        _opened(standard or arguments.input) as source,
        _reading(name),
    ):
        by_number = all(column.isdecimal() for column in arguments.text or [""])
        lines = _lines(source, name)
        first_line = next(lines, "")
        marked = first_line.startswith(_MARK)
        lines = itertools.chain([first_line.removeprefix(_MARK)], lines)
        if arguments.text != ["0"]:  # else a line may be one text, with semicolons of its own
            columns = [] if by_number else arguments.text or _expected(model)
            lines, separator = _separated(lines, separator, columns)
        header, rows = _rows(lines, separator, name, by_number)
        if by_number and separator and arguments.text not in (None, ["0"]):
            print(
                f"{name}: with columns by number the first line is labelled like the others: if "
                "it is a header, give the names of its columns",
                file=sys.stderr,
            )
        if header:  # before its rows: cut at another separator they are of no even width
            _columns(model, arguments.text, header, name)
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{name} has no rows")
        columns = _columns(model, arguments.text, list(first[1]), name)
        names = _added_columns(model)
        with _output(output, marked and bool(separator)) as target:
            write = _Writer(target, separator, header, names)
            waiting = [first]
            for row in rows:
                waiting.append(row)
                if len(waiting) == READ_AT_ONCE:
                    write.all(_labelled(model, waiting, columns, names, arguments))
                    waiting = []
            if waiting:
                write.all(_labelled(model, waiting, columns, names, arguments))
    if write.empty:
        has = "row without a text has" if write.empty == 1 else "rows without a text have"
        print(f"{write.empty:,} {has} no label", file=sys.stderr)
    if write.cut:
        were = "text was" if write.cut == 1 else "texts were"
        print(f"{write.cut:,} {were} longer than the model reads, and cut", file=sys.stderr)
    if output is not None:
        print(f"labelled: {write.count - write.empty:,} rows, {output}")
    return 0


# Where a row stands, for messages, and the row.
_Row = tuple[str, dict[str, Any]]
_Cells = tuple[Any, ...]  # what is added to a row


def _labelled(
    model: "LocalModel",
    rows: list[_Row],
    columns: list[str],
    names: tuple[str, ...],
    arguments: argparse.Namespace,
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each row with what is added to it, and whether its text was cut."""
    texts = [_words(row, columns, where) for where, row in rows]
    given = [i for i, text in enumerate(texts) if text.joined.strip()]
    try:
        found = _answers(model, [texts[i] for i in given], arguments) if given else []
    except ServeError as error:
        raise ValueError(_naming_the_row(error, [rows[i][0] for i in given])) from None
    answers = dict(zip(given, found, strict=True))
    for i, (_, row) in enumerate(rows):
        cells, truncated = answers.get(i, ((None,) * len(names), False))
        yield row | dict(zip(names, cells, strict=True)), truncated


def _added_columns(model: "LocalModel") -> tuple[str, ...]:
    if model.task != "tag":
        return "predicted_label", "predicted_score", "predicted_steps"
    return "predicted_text" if model.fills else "predicted_labels", "predicted_steps"


def _answers(
    model: "LocalModel", texts: "list[_Text]", arguments: argparse.Namespace
) -> list[tuple[_Cells, bool]]:
    """The added cells of each text, and whether it was cut."""
    joined, steps, effort = [one.joined for one in texts], arguments.steps, arguments.effort
    if model.task != "tag":
        labels = model.classify(joined, steps=steps, effort=effort)
        return [((one.label, round(one.score, 6), one.steps), one.truncated) for one in labels]
    tagged = model.tag(joined, steps=steps, effort=effort)
    return [
        (
            (_label_of_each(text, one.tokens) if one.text is None else one.text, one.steps),
            one.truncated,
        )
        for text, one in zip(texts, tagged, strict=True)
    ]


class _Text(NamedTuple):
    """The words of a text: those of a list, or what spaces separate."""

    words: list[str]
    listed: bool  # each of them counts, one without a letter too

    @property
    def joined(self) -> str:
        return " ".join(self.words)


def _label_of_each(text: _Text, tokens: "list[TokenLabel]") -> list[str | None]:
    """The label at the beginning of each word; None of one that is empty or was cut off."""
    labels = {token["start"]: token["label"] for token in tokens}
    if not text.listed:  # ends of lines separate words too
        return [labels.get(word.start()) for word in re.finditer(r"\S+", text.joined)]
    starts = itertools.accumulate((len(word) + 1 for word in text.words[:-1]), initial=0)
    placed = zip(starts, text.words, strict=True)
    return [labels.get(start) if word else None for start, word in placed]


def _words(row: dict[str, Any], columns: list[str], where: str) -> _Text:
    cells = [row.get(column) for column in columns]  # lines of JSON may leave one out
    if len(cells) == 1 and isinstance(cells[0], list):
        return _Text([str(word) for word in cells[0]], listed=True)
    for column, cell in zip(columns, cells, strict=True):
        if isinstance(cell, dict | list):
            raise ValueError(f"{where}: {column} is no text: {json.dumps(cell)[:60]}")
    # What is missing is null or NaN, the only value that does not equal itself. It is an empty
    # text, as in training and in a CSV file.
    text = " ".join("" if cell is None or cell != cell else str(cell) for cell in cells)
    return _Text(text.split(" "), listed=False)


def _naming_the_row(error: ServeError, places: list[str]) -> str:
    """What is wrong, of the row that it is wrong with."""
    said = str(error)
    at = re.match(r"inputs\[(\d+)\]", said)
    return said if at is None else places[int(at[1])] + said[at.end() :]


def _sample(arguments: argparse.Namespace) -> int:
    from serve.local import LocalModel

    with LocalModel(arguments.bundle, arguments.threads) as model:
        print(
            model.generate(
                arguments.prompt,
                max_tokens=arguments.max_tokens,
                steps=arguments.steps,
                effort=cast(Effort | None, arguments.effort),
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
            )
        )
    return 0


def _columns(
    model: "LocalModel", asked: list[str] | None, there: list[str], name: str
) -> list[str]:
    """Those of the texts, if the table has them."""
    columns = asked or _expected(model)
    missing = [column for column in columns if column not in there]
    if not missing:
        return columns
    trained = _trained_on(model)
    if asked is None and columns != trained:
        of = "column" if len(trained) == 1 else "columns"
        raise ValueError(
            f"{name} has {', '.join(there)}: name those of the texts with --text. The model was "
            f"trained on {of} {', '.join(trained)} of a table without a header: for one like that "
            "give these numbers"
        )
    raise ValueError(
        f"{name} has no column {', '.join(missing)}; it has {', '.join(there)}: name those of the "
        "texts with --text. Commas or semicolons separate columns, tabs in .tsv"
    )


def _expected(model: "LocalModel") -> list[str]:
    """The columns where none are named: as in training, or `text` if those had no names."""
    columns = _trained_on(model)
    return ["text"] if all(column.isdecimal() for column in columns) else columns


def _trained_on(model: "LocalModel") -> list[str]:
    """The columns of the texts in training, as the bundle notes them."""
    recipe = model._served.manifest.provenance.get("recipe")
    try:
        return [str(column) for column in cast(Any, recipe)["data"]["text"]]
    except (TypeError, KeyError):
        return ["text"]


def _kind(table: Path | io.BufferedReader) -> str:
    """How the name of such a table ends; of standard input, its first character decides."""
    if not isinstance(table, Path):
        begun = table.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()
        return ".jsonl" if begun.startswith((b"{", b"[{")) else ".csv"
    plain = table.with_suffix("") if table.suffix.lower() in _COMPRESSED else table
    kind = plain.suffix.lower()
    if kind not in _SEPARATORS:
        raise ValueError(f"{table}: expected .csv, .tsv or .jsonl, plain or as .gz or .xz")
    return kind


_COMPRESSED: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
_MARK = "\ufeff"  # a byte order mark, read as UTF-8
_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}  # how such data begins


def _standard_input() -> io.BufferedReader:
    """Standard input, unpacked if it is compressed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: name a file with --input")
    standard = cast(io.BufferedReader, sys.stdin.buffer)
    begun = standard.peek(8)
    for ending, magic in _MAGIC.items():
        if begun.startswith(magic):
            return cast(io.BufferedReader, _COMPRESSED[ending](standard, "rb"))
    return standard


def _opened(table: Path | io.BufferedReader) -> IO[str]:
    """A table to read."""
    if isinstance(table, Path):
        return _opener(table)(table, "rt", encoding="utf-8", newline="")
    return io.TextIOWrapper(table, encoding="utf-8", newline="")


def _opener(path: Path) -> Callable[..., IO[str]]:
    """What opens a file of this name as text."""
    return _COMPRESSED.get(path.suffix.lower(), open)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Say of which table it is that it cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise ValueError(
            f"{name}: not UTF-8 ({error.reason}); convert it first, as in: "
            f"iconv -f {'utf-16' if wide else 'cp1252'} -t utf-8 old > new"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def _rows(
    source: Iterator[str], separator: str, name: str, by_number: bool
) -> tuple[list[str], Iterator[_Row]]:
    """The header, [] where columns have numbers or lines are JSON; and the rows."""
    if not separator:
        return [], _objects(source, name)
    lines = _cells(source, separator, name)
    header = next(lines, [])
    if by_number:
        names, lines = list(map(str, range(len(header)))), itertools.chain([header], lines)
        return [], _named(names, lines, name) if header else iter(())
    names = [column.strip() for column in header]
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise ValueError(f"{name}: two columns are called {twice!r}: rename one")
    return names, _named(names, lines, name)


def _lines(source: IO[str], name: str) -> Iterator[str]:
    """The lines of a table; a file without line ends is not read whole."""
    for number, line in enumerate(iter(partial(source.readline, LONGEST_LINE + 1), ""), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"{name}, line {number}: longer than {LONGEST_LINE:,} characters: is this a table?"
            )
        yield line


def _separated(
    lines: Iterator[str], separator: str, columns: Sequence[str]
) -> tuple[Iterator[str], str]:
    """The lines of a table, and what separates its columns: see docs/own-data.md."""
    first = next(lines, "")
    if separator == "," and ";" in first and len(first) <= LONGEST_CELL:
        at_commas, at_semicolons = (
            {name.strip() for name in next(csv.reader([first], delimiter=one), [])} for one in ",;"
        )
        found = bool(columns) and at_semicolons.issuperset(columns)
        if "," not in first or (found and not at_commas.issuperset(columns)):
            separator = ";"
    return itertools.chain([first], lines), separator


def _cells(source: Iterator[str], separator: str, name: str) -> Iterator[list[str]]:
    """The rows, the header with them, without empty lines."""
    reader = csv.reader(source, delimiter=separator, strict=True)
    read = 0  # lines
    try:
        for cells in reader:
            read = reader.line_num
            if cells:
                yield cells
    except csv.Error as error:
        raise ValueError(
            f"{name} cannot be read: line {read + 1}: {error}; is a quote inside a text not "
            "doubled, or is a quote of a text never closed?"
        ) from None


def _named(names: list[str], lines: Iterator[list[str]], name: str) -> Iterator[_Row]:
    for number, cells in enumerate(lines, 1):
        where = f"{name}, row {number}"
        if len(cells) != len(names):
            raise ValueError(f"{where}: {len(cells)} cells, but the first line has {len(names)}")
        yield where, dict(zip(names, cells, strict=True))


def _objects(source: Iterator[str], name: str) -> Iterator[_Row]:
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # of a number of many digits too
            raise ValueError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected one object a line")
        yield where, row


@contextmanager
def _output(path: Path | None, marked: bool) -> Iterator[IO[str]]:
    """Where to write. A file is replaced once all is written: it may be the one that is read.

    A marked file begins with a byte order mark, by which spreadsheets know that it is UTF-8.
    """
    if path is None:
        if sys.stdout is None:
            raise ValueError("standard output is closed: name a file with --output")
        yield sys.stdout
        return
    opener, encoding = _opener(path), "utf-8-sig" if marked else "utf-8"
    if path.exists() and not path.is_file():  # a pipe or a device
        with opener(path, "wt", encoding=encoding, newline="") as file:
            yield file
        return
    target = path.resolve()
    if not target.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}")
    # Drawn: in containers that share a folder, process ids are the same.
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with opener(partial, "xt", encoding=encoding, newline="") as file:
            yield file
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class _Writer:
    """Rows of the kind of table that was read."""

    def __init__(
        self, target: IO[str], separator: str, header: list[str], added: tuple[str, ...]
    ) -> None:
        self._target, self._separator, self._added = target, separator, added[0]
        writer = partial(csv.writer, target, delimiter=separator or ",", lineterminator="\n")
        self._plain, self._quoted = writer(), writer(quoting=csv.QUOTE_ALL)
        self._header = list(dict.fromkeys((*header, *added))) if header else []
        self.count = self.empty = self.cut = 0

    def all(self, rows: Iterator[tuple[dict[str, Any], bool]]) -> None:
        for row, truncated in rows:
            if self._header and not self.count:  # not before there is an answer
                self._write(self._header)
            self.count += 1
            self.cut += truncated
            self.empty += row[self._added] is None
            if not self._separator:
                line = json.dumps(row, ensure_ascii=False)
                if _HALF_A_CHARACTER.search(line):
                    line = json.dumps(row)  # as it may have come
                self._target.write(line + "\n")
                continue
            if isinstance(row[self._added], list):
                row[self._added] = " ".join(label or "-" for label in row[self._added])
            self._write(row.values())

    def _write(self, cells: Iterable[object]) -> None:
        # Python before 3.13 writes a carriage return without quotes, as the end of a line.
        ends = any("\r" in str(cell) for cell in cells)
        (self._quoted if ends else self._plain).writerow(cells)
