"""The page that shows each figure beside the paper's numbers, as Markdown; the same text each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini_ft.planning.paper.beyond import Beyond, SimulatedRow
from gemini_ft.planning.paper.comparison import Figure, Row, Verdict
from gemini_ft.planning.paper.values import PaperValue, Relation
from gemini_ft.planning.simulation.results import Tier

__all__ = [
    "COMPARISON_HEADER",
    "REDUNDANCY_HEADER",
    "REWRITE_COMMAND",
    "SIMULATED_HEADER",
    "beyond_tables",
    "comparison_rows",
    "format_paper",
    "format_value",
    "markdown_table",
    "plot_name",
    "render_page",
]

COMPARISON_HEADER = ("quantity", "ours", "paper", "source", "verdict")
SIMULATED_HEADER = (
    "variant",
    "effective time",
    "a failure costs (s)",
    "recoveries a day",
    "from persistent tier, a year",
)
REDUNDANCY_HEADER = ("machines", "redundancy", "keeps (shards)", "sends (shards)", "2 lost", "3 lost", "4 lost")
REWRITE_COMMAND = (
    "gemini-ft reproduce --markdown docs/reproducing-the-paper.md --plots docs/images/paper --plot-format svg"
)

_INTRODUCTION = f"""\
# Reproducing the paper

Every figure of the evaluation of "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints"
(SOSP'23) that placement, schedule and simulation can answer, computed by this project and set beside the paper's own
numbers. This page is written by

    {REWRITE_COMMAND}

and a test holds it against a new computation, byte for byte. One figure alone: `gemini-ft reproduce 15a`, with
`--plots DIR` for its picture. Exit code 1 says that a value is not the paper's and that no explanation holds.

*Within* means: for a printed value, at most 3 % or its rounding away; for a value read off a figure, at most 2 % of
the axis; for a bound, kept. *Differs* means that it is not, that the reason is given below the table, and that our
value is the one which that reason predicts. These models say what the paper's method does in its own terms;
measurements of this implementation are in the README.
"""


def plot_name(figure: Figure) -> str:
    """Return the name of a figure's plot, without its suffix."""
    return f"figure-{figure.number}"


def format_value(value: float) -> str:
    """Return four significant digits, without an exponent for what people read."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_paper(paper: PaperValue) -> str:
    """Return the paper's claim with its tolerance."""
    unit = f" {paper.unit}" if paper.unit else ""
    if paper.relation is not Relation.ABOUT:
        return f"{paper.relation} {paper.value:g}{unit}"
    tolerance = f" +- {paper.tolerance:.2g}" if paper.tolerance else ""
    return f"{paper.value:g}{tolerance}{unit}"


def comparison_rows(rows: Sequence[Row]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the cells of a figure's table under COMPARISON_HEADER, and the reasons that its verdicts number."""
    reasons: list[str] = []
    cells: list[tuple[str, ...]] = []
    for row in rows:
        verdict: str = row.verdict
        if row.verdict is Verdict.EXPLAINED and row.difference is not None:
            if row.difference.reason not in reasons:
                reasons.append(row.difference.reason)
            verdict = f"{verdict} ({reasons.index(row.difference.reason) + 1})"
        cells.append((row.quantity, format_value(row.ours), format_paper(row.paper), row.paper.source, verdict))
    return cells, reasons


def beyond_tables(found: Beyond) -> tuple[list[tuple[str, list[tuple[str, ...]]]], list[tuple[str, ...]]]:
    """Return (axis, cells under SIMULATED_HEADER) for each axis, and the cells under REDUNDANCY_HEADER."""
    axes = dict.fromkeys(row.axis for row in found.simulated)
    simulated = [(axis, [_simulated(row) for row in found.simulated if row.axis == axis]) for axis in axes]
    redundancy = [
        (
            f"{row.num_machines:,}",
            row.label,
            f"{row.kept_shards:g}",
            f"{row.sent_shards:g}",
            *(_percent(probability) for probability in row.probabilities.values()),
        )
        for row in found.redundancy
    ]
    return simulated, redundancy


def render_page(figures: Sequence[Figure], found: Beyond, images: str | None) -> str:
    """Return the page; `images` is the folder of the plots relative to it, None leaves them out."""
    rows = [row for figure in figures for row in figure.rows]
    num_within = sum(row.verdict is Verdict.WITHIN for row in rows)
    num_differing = sum(row.verdict is Verdict.EXPLAINED for row in rows)
    parts = [
        _INTRODUCTION,
        f"Of {len(rows)} values, {num_within} are within, {num_differing} differ for a reason that is known, and "
        f"{len(rows) - num_within - num_differing} are outside.\n",
        "## Where our result is not the printed one\n",
        _differences(figures),
    ]
    parts += [_section(figure, images) for figure in figures]
    parts.append(_beyond(found))
    return "\n".join(parts)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _differences(figures: Sequence[Figure]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for figure in figures:
        for row in figure.rows:
            if row.verdict is Verdict.EXPLAINED and row.difference is not None:
                values = f"{row.quantity} {format_value(row.ours)}, paper {row.paper.value:g} {row.paper.unit}".rstrip()
                lines.setdefault((figure.number, row.difference.reason), []).append(values)
    return "".join(
        f"- [Figure {number}](#{_anchor(number, figures)}): {'; '.join(values)}. {reason[0].upper()}{reason[1:]}.\n"
        for (number, reason), values in lines.items()
    )


def _heading(figure: Figure) -> str:
    return f"Figure {figure.number}: {figure.title}"


def _anchor(number: str, figures: Sequence[Figure]) -> str:
    heading = next(_heading(figure) for figure in figures if figure.number == number)
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_ ")
    return kept.replace(" ", "-")


def _section(figure: Figure, images: str | None) -> str:
    cells, reasons = comparison_rows(figure.rows)
    parts = [f"## {_heading(figure)}\n", f"`gemini-ft reproduce {figure.number}`\n"]
    if images is not None:
        parts.append(f"![{_heading(figure)}]({images}/{plot_name(figure)}.svg)\n")
    parts.append(markdown_table(COMPARISON_HEADER, cells))
    if reasons:
        parts.append("".join(f"{number}. Differs: {reason}.\n" for number, reason in enumerate(reasons, 1)))
    parts.append("\n\n".join(figure.notes) + "\n")
    return "\n".join(parts)


def _beyond(found: Beyond) -> str:
    simulated, redundancy = beyond_tables(found)
    parts = [
        "## Beyond the paper\n",
        "`gemini-ft reproduce beyond`\n",
        "The paper's p4d job on 1,000 machines, each row with one thing changed. 1.5 % of the machines fail a day, "
        "half of them in hardware; racks of 32 machines, each of which fails as a whole once in two years; 4 "
        "standbys; the state in memory twice; a restart that takes what `gemini-ft demo` measured. Rates and racks "
        "are assumptions, and the demo's phases are a lower bound for a job of this size. Mean and 95 % interval of "
        "4 runs of 120,000 machine-days each.\n",
    ]
    for axis, cells in simulated:
        parts += [f"### {axis.capitalize()}\n", markdown_table(SIMULATED_HEADER, cells)]
    parts += [
        _lessons(found),
        "### Redundancy, exactly\n",
        "Probability that the job recovers from memory when 2, 3 or 4 machines, all choices equally likely, are lost "
        "before any of them is replaced, with the best placement for each m.\n",
        markdown_table(REDUNDANCY_HEADER, redundancy),
        "Groups of 4 with an erasure code survive nearly what m = 3 does, with the memory of m = 2 and half as much "
        "traffic again. No machine then has its own shard whole, so that even a killed process needs the network.\n",
    ]
    return "\n".join(parts)


def _lessons(found: Beyond) -> str:
    ratio = {row.label: row.summary.effective_time_ratio.mean for row in found.simulated}
    persistent = {row.label: _persistent_a_year(row) for row in found.simulated}

    def gain(better: str, worse: str) -> str:
        return f"{100 * (ratio[better] - ratio[worse]):+.1f} points"

    published, cold, warm = "GEMINI as published", "nothing serialised, cold restart", "warm restart"
    return (
        "What each buys, in effective time:\n\n"
        f"- **Nothing serialised**: {gain(f'1,000 machines, {cold}', f'1,000 machines, {published}')} at 1,000 "
        f"machines, {gain(f'10,000 machines, {cold}', f'10,000 machines, {published}')} at 10,000.\n"
        f"- **A warm restart on top**: {gain(f'1,000 machines, {warm}', f'1,000 machines, {cold}')} at 1,000 "
        f"machines, {gain(f'10,000 machines, {warm}', f'10,000 machines, {cold}')} at 10,000.\n"
        f"- **Racks apart**: {gain('m = 2, racks apart', 'm = 2, racks ignored')}, and "
        f"{persistent['m = 2, racks ignored']:.0f} recoveries a year from the persistent tier become "
        f"{persistent['m = 2, racks apart']:.0f}. It costs nothing. m = 3 does not help against a rack that holds all "
        "three copies.\n"
        f"- **The first standby**: {gain('1 standbys', '0 standbys')}; three more "
        f"{gain('4 standbys', '1 standbys')}.\n"
        "- **At 100,000 machines** a failure comes about every minute, as often as an iteration of 62 s: no checkpoint "
        "in memory keeps that job alive. It takes failures that do not stop the whole job.\n"
    )


def _simulated(row: SimulatedRow) -> tuple[str, ...]:
    ratio = row.summary.effective_time_ratio
    half = 0.0 if ratio.high is None else ratio.high - ratio.mean
    cost_s = row.summary.wasted_s_per_failure
    num_recoveries = sum(estimate.mean for estimate in row.summary.recoveries.values())
    return (
        row.label,
        f"{ratio.mean:.4f} +- {half:.4f}",
        "none" if cost_s is None else f"{cost_s:.0f}",
        f"{num_recoveries / row.num_days:.1f}",
        f"{_persistent_a_year(row):.1f}",
    )


def _persistent_a_year(row: SimulatedRow) -> float:
    return row.summary.recoveries[Tier.PERSISTENT].mean / row.num_days * 365


def _percent(probability: float) -> str:
    return "100 %" if probability == 1 else f"{100 * probability:.4f} %"
