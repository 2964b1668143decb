"""Exports, verifies and times bundles on a GPU in every way there is, and prints a table.

    python -m benchmarks.gpu [BUNDLE ...] [--results FILE]

Without a bundle: the zoo. Of every bundle whole calls are timed (`benchmarks.gpu.engines`), of a
decoder tokens a second too (`benchmarks.gpu.writing`). What could not be run is listed with the
reason. The tables are Markdown. Ends with status 3 where there is no GPU, after
what runs without one; 2 for a bundle that cannot be read; 1 where something is wrong; else 0.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu import engines, writing
from benchmarks.lab import ZOO, Provenance, Table, bundles_in, markdown_table
from serve.bundle import Bundle, BundleError, read_bundle
from serve.runtime.tensorrt import open_cuda

WRONG, UNUSABLE, NO_GPU = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser().parse_args(arguments)
    folders = parsed.bundles or bundles_in(ZOO)
    try:
        bundles = [read_bundle(folder) for folder in folders]
    except BundleError as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    try:
        host, missing = open_cuda().facts(), None
    except BundleError as error:
        host, missing = {}, str(error)
    provenance = Provenance.now("gpu", arguments)
    records: dict[str, object] = {}
    wrong = False
    print(_where(provenance, host, missing))
    for bundle in bundles:
        found, right = _measured(bundle, parsed.calls)
        records[bundle.manifest.name] = found
        wrong |= not right
    if parsed.results is not None:
        record = {
            "command": provenance.command,
            "commit": provenance.commit,
            "host": host,
            "no_gpu": missing,
            "bundles": records,
        }
        parsed.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if wrong:
        return WRONG
    return 0 if missing is None else NO_GPU


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="*", metavar="BUNDLE", help="default: the zoo")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where to keep the JSON")
    parser.add_argument("--calls", type=int, default=20, help="timed calls (%(default)s)")
    return parser


def _measured(bundle: Bundle, calls: int) -> tuple[dict[str, object], bool]:
    """The record of a bundle, and whether all of it was right; its tables are printed."""
    name = bundle.manifest.name
    with tempfile.TemporaryDirectory() as folder:
        timed, skipped, broken = engines.measure(bundle, Path(folder) / "engines", calls)
        print(f"\n### {name}: whole calls\n")
        columns = ("way", "steps", "rows", "ms", "error of the largest logit")
        rows = [(it.way, it.steps, it.rows, it.median_ms, f"{it.error:.1e}") for it in timed]
        print(markdown_table(Table("", columns, rows)))
        right = all(one.right for one in timed)
        found: dict[str, object] = {"calls": [asdict(one) for one in timed]}
        if bundle.manifest.keeps_caches and not bundle.manifest.rounds:
            report = writing.measure(bundle, Path(folder) / "halves", max(3, calls // 4))
            print(f"\n### {name}: tokens a second\n")
            print(_tokens(report.written))
            skipped, broken = skipped | report.skipped, broken | report.broken
            right &= all(one.right for one in report.written)
            found["writing"] = [asdict(one) for one in report.written]
    for title, reasons in (("Skipped", skipped), ("Broken", broken)):
        if reasons:
            print(f"\n{title}:\n")
            print("\n".join(f"* {way}: {why}" for way, why in reasons.items()))
    return found | {"skipped": skipped, "broken": broken}, right and not broken


def _where(provenance: Provenance, host: dict[str, str], missing: str | None) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in host.items())
    return (
        f"{facts or f'No GPU was used: {missing}'}\n"
        f"{provenance.machine.sentence}\n"
        f"`{provenance.command}` at {provenance.commit}, {provenance.date}"
    )


def _tokens(written: Sequence[writing.Written]) -> str:
    rows = []
    for one in written:
        known = one.against_fp32
        agreed = "" if known is None else f"{100 * known.top1_agreement:.2f} %"
        change = "" if known is None else f"{known.change:+.4f}"
        rows.append((one.way, one.steps, one.rows, one.tokens_a_second, agreed, change))
    columns = ("way", "steps", "rows", "tokens a second", "tokens as in float32", "change of loss")
    return markdown_table(Table("", columns, rows))


if __name__ == "__main__":
    sys.exit(main())
