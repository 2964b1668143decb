"""A result: what one script measured, as it is kept in results/NAME.json and shown.

Knows tables, targets and their writing; deliberately nothing of how anything was measured.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from benchmarks.machine import Machine, command_line, commit, this_machine, today

RESULTS = Path(__file__).resolve().parent / "results"
# Written by baselines.py over several runs, in a form of its own; quality.py shows what it says.
BASELINES = RESULTS / "baselines.json"
SCHEMA_VERSION = 1

Cell = str | int | float | None
Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of measured values under a caption; numbers stay unrounded here."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.caption}: {len(row)} cells under {len(self.columns)}")


@dataclass(frozen=True, slots=True)
class Target:
    """A measured value beside what it should be."""

    what: str
    value: float
    relation: Relation
    wanted: float
    unit: str = ""

    @property
    def met(self) -> bool:
        if self.relation == "<=":
            return self.value <= self.wanted
        return self.value >= self.wanted if self.relation == ">=" else self.value == self.wanted


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that one run of one script found."""

    name: str
    title: str
    about: str
    command: str
    commit: str
    date: str
    machine: Machine
    tables: Sequence[Table]
    targets: Sequence[Target]

    def write(self, folder: Path = RESULTS) -> Path:
        """Keep it as NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        record = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` kept."""
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"{path} is of another schema version: measure again")
        record["machine"] = Machine(**record["machine"])
        record["tables"] = [Table(**table) for table in record["tables"]]
        record["targets"] = [Target(**target) for target in record["targets"]]
        return cls(**record)

    @property
    def markdown(self) -> str:
        """A section of RESULTS.md."""
        parts = [f"## {self.title}", self.about]
        parts += [f"{table.caption}\n\n{_markdown_table(table)}" for table in self.tables]
        if self.targets:
            parts.append(_markdown_table(_target_table(self.targets)))
        parts.append(
            f"`{self.command}` at {self.commit}, {self.date}.\nMachine: {self.machine.sentence}."
        )
        return "\n\n".join(parts) + "\n"

    @property
    def text(self) -> str:
        """The same for a terminal."""
        parts = [self.title, self.about]
        parts += [f"{table.caption}\n{text_table(table)}" for table in self.tables]
        if self.targets:
            parts.append(text_table(_target_table(self.targets)))
        parts.append(f"{self.command}\nat {self.commit}, {self.date}\n{self.machine.sentence}")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a measurement was started; taken before it begins, so that the load is not its own."""

    command: str
    commit: str
    date: str
    machine: Machine

    @classmethod
    def now(cls, name: str, arguments: Sequence[str]) -> Self:
        return cls(
            command=command_line(f"benchmarks.{name}", arguments),
            commit=commit(),
            date=today(),
            machine=this_machine(),
        )

    def result(
        self,
        name: str,
        title: str,
        about: str,
        tables: Sequence[Table],
        targets: Sequence[Target],
    ) -> Result:
        """A result that was measured from here on."""
        return Result(
            name, title, about, self.command, self.commit, self.date, self.machine, tables, targets
        )


def format_cell(cell: Cell) -> str:
    """A value with the digits that mean something."""
    match cell:
        case None:
            return "–"
        case str() | int():
            return str(cell)
    size = abs(cell)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{cell:.0f}"
    if size >= 10:
        return f"{cell:.1f}"
    return f"{cell:.2f}" if size >= 1 else f"{cell:.4f}" if size < 0.1 else f"{cell:.3f}"


def _target_table(targets: Sequence[Target]) -> Table:
    rows: list[list[Cell]] = []
    for target in targets:
        unit = f" {target.unit}" if target.unit else ""
        wanted = f"{target.relation} {target.wanted:g}{unit}"
        found = f"{format_cell(target.value)}{unit}"
        rows.append([target.what, wanted, found, "met" if target.met else "MISSED"])
    return Table("Targets", ("target", "wanted", "measured", ""), rows)


def _markdown_table(table: Table) -> str:
    numeric = [
        all(not isinstance(row[index], str) for row in table.rows)
        for index in range(len(table.columns))
    ]
    lines = [
        "| " + " | ".join(table.columns) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
    ]
    lines += ["| " + " | ".join(map(format_cell, row)) + " |" for row in table.rows]
    return "\n".join(lines)


def text_table(table: Table) -> str:
    cells = [list(table.columns), *(list(map(format_cell, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
