"""Tables, verdicts, and their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness._series import Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of one figure with its target."""

    what: str
    case: str
    target: str
    got: str
    is_met: bool


@dataclass(slots=True)
class Table:
    """Rows of figures, a line for each contender."""

    title: str
    columns: tuple[str, ...]
    """Headings; the first one is for the names of the rows."""
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row; raises ValueError unless it has one cell per column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def as_markdown(self) -> str:
        """Return the table in GitHub's syntax, with aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]

        def shown(cells: Sequence[str]) -> str:
            first, *rest = (
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return f"| {' | '.join([first, *rest])} |"

        rule = "|".join("-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths))
        return "\n".join([f"**{self.title}**", "", shown(self.columns), f"|{rule}|", *map(shown, self.rows)])


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar for each contender: the median, with the middle half marked."""

    title: str
    unit: str
    bars: dict[str, Series]


@dataclass(slots=True)
class Section:
    """Findings of one part."""

    name: str
    """Name of the part, as on the command line."""
    title: str
    tables: list[Table] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Omissions with their reasons, and facts needed to read the figures."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Every single measurement, by case, contender and figure, joined by slashes."""

    def keep(self, case: str, series: Mapping[str, Series], figure: str = "s") -> None:
        """Keep the values behind a table's medians."""
        for name, of_name in series.items():
            self.samples[f"{case}/{name}/{figure}"] = of_name.values

    def note(self, line: str) -> None:
        """Add a note, once."""
        if line not in self.notes:
            self.notes.append(line)

    def as_markdown(self) -> str:
        """The section as text."""
        blocks = [f"## {self.name}: {self.title}", *(table.as_markdown() for table in self.tables)]
        if self.verdicts:
            blocks.append(_targets_table([self]).as_markdown())
        if self.notes:
            blocks.append("\n".join(f"* {note}" for note in self.notes))
        return "\n\n".join(blocks)


def write_results(
    sections: Sequence[Section], machine: Mapping[str, str], command: str, out: Path, stem: str
) -> list[Path]:
    """Write the findings: as text, as JSON with every single measurement, and as pictures.

    Args:
        sections: One per part.
        machine: See `describe_machine`.
        command: The command line of the run.
        out: Folder; created if missing.
        stem: The beginning of the files' names.

    Returns:
        The files written.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_charts(sections, out, stem)
    blocks = [f"# Benchmark {stem}", f"`{command}`", "\n".join(f"* {name}: {text}" for name, text in machine.items())]
    if any(section.verdicts for section in sections):
        blocks.append(_targets_table(sections).as_markdown())
    for section in sections:
        blocks.append(section.as_markdown())
        blocks += [f"![{section.name}]({path.name})" for path in pictures.get(section.name, ())]
    text = out / f"{stem}.md"
    text.write_text("\n\n".join(blocks) + "\n")
    content: dict[str, Any] = {"command": command, "machine": dict(machine)}
    content["parts"] = [dataclasses.asdict(section) for section in sections]
    figures = out / f"{stem}.json"
    figures.write_text(json.dumps(content, indent=1) + "\n")
    return [text, figures, *(path for paths in pictures.values() for path in paths)]


def draw_charts(sections: Sequence[Section], out: Path, stem: str) -> dict[str, list[Path]]:
    """Draw the charts of each section into one picture; none if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    pictures = {}
    for section in sections:
        if not section.charts:
            continue
        heights = [1 + 0.28 * len(chart.bars) for chart in section.charts]
        figure = Figure((9, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
        for axis, chart in zip(axes, section.charts, strict=True):
            medians = [series.median for series in chart.bars.values()]
            halves = [series.quartiles for series in chart.bars.values()]
            spread = [
                [median - low for median, (low, _) in zip(medians, halves, strict=True)],
                [high - median for median, (_, high) in zip(medians, halves, strict=True)],
            ]
            colours = ["C1" if name.startswith("tensorcas") else "C0" for name in chart.bars]
            axis.barh(list(chart.bars), medians, xerr=spread, color=colours)
            axis.invert_yaxis()
            axis.set_title(chart.title, fontsize=10)
            axis.set_xlabel(chart.unit)
        path = out / f"{stem}-{section.name}.png"
        figure.savefig(path, dpi=100)
        pictures[section.name] = [path]
    return pictures


def _targets_table(sections: Sequence[Section]) -> Table:
    table = Table("Targets", ("what", "case", "target", "got", "met"))
    for verdict in (verdict for section in sections for verdict in section.verdicts):
        table.add(verdict.what, verdict.case, verdict.target, verdict.got, "yes" if verdict.is_met else "no")
    return table
