"""A report as one HTML file without outside parts: it works offline, in light and dark, and on a phone."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence

from torch_xla_ckpt.inspecting.contents import Contents, RunContents, cells
from torch_xla_ckpt.inspecting.layouts import Layout
from torch_xla_ckpt.inspecting.reporting import Report, TensorFacts
from torch_xla_ckpt.inspecting.text import shown
from torch_xla_ckpt.inspecting.treemaps import Tile, treemap
from torch_xla_ckpt.inspecting.words import shape_words
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.reports import format_bytes

_WIDTH, _HEIGHT = 960, 420  # units of the treemap
_LETTER = 6.8  # units that a letter takes on average
_MOST_ROWS = 2000  # lines of a table; a page with more of them is slow
_MOST_BOXES = 400  # boxes of one drawing

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #6a737d; --line: #d8dee4; --card: #f6f8fa;
  --bad: #b42318; --bar: #3b76c4 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0f1318; --faint: #9aa4af; --line: #2d343c;
  --card: #171c22; --bad: #ff8f80; --bar: #79b0f2 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.35rem; margin: .5rem 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, dd { margin: .2rem 0 } .faint { color: var(--faint) } .bad { color: var(--bad); font-weight: 600 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; width: 100% }
th, td { padding: .2rem .6rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.key { white-space: normal; min-width: 14rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0 } dt { color: var(--faint) }
svg { max-width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
.tile { stroke: var(--paper); stroke-width: 1.5 } .tile text, text.on { fill: #10151b }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem }
.axis { stroke: var(--line) } .curve { fill: none; stroke: var(--bar); stroke-width: 2 } .dot { fill: var(--bar) }
"""


def page(report: Report) -> str:
    """Return a report as the text of an HTML file."""
    path = report.run.path if report.run is not None else report.contents.path if report.contents is not None else ""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(path)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(path)}</h1>",
        *(_run(report.run) if report.run is not None else ()),
        *(_contents(report, report.contents) if report.contents is not None else ()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _contents(report: Report, contents: Contents) -> Iterator[str]:
    if report.run is not None:
        yield f"<h2>Newest whole step: {_text(contents.path)}</h2>"
    yield f"<p>{_text(', '.join(contents.facts()))}</p>"
    yield from _suspicious(report)
    yield "<h2>Sizes by module</h2>"
    yield _treemap(contents)
    if report.layouts:
        yield "<h2>Layouts of the largest tensors</h2><p class=faint>Devices, or ranks, that held each box.</p>"
        yield f"<div class=grid>{''.join(map(_layout, report.layouts))}</div>"
    if report.tensors:
        yield "<h2>Statistics</h2>"
        yield _statistics(report.tensors)
    yield "<h2>Keys</h2>"
    yield _keys(contents)
    yield "<h2>Provenance</h2>"
    yield _provenance(contents)


def _suspicious(report: Report) -> Iterator[str]:
    if not report.tensors:
        yield "<p class=faint>The values were not read.</p>"
        return
    if not report.suspicious:
        yield "<p>No tensor has suspicious values.</p>"
        return
    yield f"<h2 class=bad>Suspicious values in {len(report.suspicious):,} of {len(report.tensors):,} tensors</h2>"
    rows = [(one.key, ", ".join(one.suspicions)) for one in report.suspicious[:_MOST_ROWS]]
    yield _table(("key", "what"), rows, keys={0}, bad={1})


def _statistics(tensors: Sequence[TensorFacts]) -> str:
    rows = []
    for one in tensors[:_MOST_ROWS]:
        found = one.statistics
        numbers = ["" if n is None else f"{n:.4g}" for n in (found.min, found.max, found.mean, found.std)]
        shape = shape_words(one.shape)
        rows.append((one.key, one.dtype, shape, *numbers, f"{found.zeros:,}", ", ".join(one.suspicions)))
    head = ("key", "dtype", "shape", "min", "max", "mean", "std", "zeros", "suspicious")
    return _table(head, rows, right={3, 4, 5, 6, 7}, keys={0}, bad={8}) + _cut(len(tensors))


def _keys(contents: Contents) -> str:
    lines = contents.rows()
    rows = [cells(line) for line in lines[:_MOST_ROWS]]
    head = ("keys", "bytes", "chunks", "dtype", "shape", "sharding", "key")
    return _table(head, rows, right={0, 1, 2}, keys={6}) + _cut(len(lines))


def _provenance(contents: Contents) -> str:
    facts: list[tuple[str, object]] = [
        ("written by", contents.writer),
        ("step", "" if contents.step is None else contents.step),
        ("time", contents.time),
        ("process", contents.saved_by),
        *sorted((contents.software or {}).items()),
    ]
    if contents.user_metadata is not None:
        facts.append(("metadata", json.dumps(contents.user_metadata)))
    rows = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts if value != "")
    return f"<dl>{''.join(rows)}</dl>"


def _treemap(contents: Contents) -> str:
    tiles = treemap([(one.key, one.nbytes) for one in contents.keys], _WIDTH, _HEIGHT)
    if not tiles:
        return "<p class=faint>The checkpoint has no bytes.</p>"
    drawn = "".join(map(_tile, tiles))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="sizes by module">{drawn}</svg>'


def _tile(tile: Tile) -> str:
    label = f"{tile.name}: {format_bytes(tile.nbytes)}"
    text = ""
    if tile.width > 60 and tile.height > 18:
        fits = int((tile.width - 8) / _LETTER)
        text = f'<text class="on" x="{tile.left + 4:.1f}" y="{tile.top + 14:.1f}">{_text(_end(tile.name, fits))}</text>'
    return (
        f'<g><title>{_text(label)}</title><rect class="tile" fill="{_colour(tile.hue)}" x="{tile.left:.1f}" '
        f'y="{tile.top:.1f}" width="{tile.width:.1f}" height="{tile.height:.1f}"/>{text}</g>'
    )


def _end(name: str, most: int) -> str:
    """Return the end of a key that has at most ``most`` characters: its last parts, or characters of the last part."""
    parts = name.split(".")
    for number in range(len(parts)):
        if len(end := ".".join(parts[number:])) <= most:
            return end
    return "…" + name[len(name) - most + 1 :]


def _layout(layout: Layout) -> str:
    shape = shape_words(layout.shape)
    held = list(layout.holders().items())[:_MOST_BOXES]
    dims = [dim for dim in range(len(layout.shape)) if len({box.offsets[dim] for box, _ in held}) > 1][:2]
    dims += [dim for dim in reversed(range(len(layout.shape))) if dim not in dims][: 2 - len(dims)]
    dims.sort()
    drawn = "".join(_box(layout.shape, dims, box, who, n) for n, (box, who) in enumerate(held))
    return (
        f"<div class=card><b>{_text(layout.key)}</b><p class=faint>{shape}, {len(layout.chunks)} chunks</p>"
        f'<svg viewBox="0 0 240 120" role="img" aria-label="layout">{drawn}</svg></div>'
    )


def _box(shape: Sequence[int], dims: Sequence[int], box: Box, who: str, number: int) -> str:
    """Return a box as a rectangle in 240 by 120 units."""

    def span(dim: int | None, length: float) -> tuple[float, float]:
        if dim is None or not shape[dim]:
            return 0, length
        return box.offsets[dim] / shape[dim] * length, box.sizes[dim] / shape[dim] * length

    rows, columns = (None, dims[0] if dims else None) if len(dims) < 2 else (dims[0], dims[1])
    (left, width), (top, height) = span(columns, 240), span(rows, 120)
    text = ""
    if width > 7 * len(who) and height > 12:
        middle = f'x="{left + width / 2:.1f}" y="{top + height / 2 + 4:.1f}"'
        text = f'<text class="on" text-anchor="middle" {middle}>{_text(who)}</text>'
    return (
        f'<g><title>{_text(f"{box} {who}")}</title><rect class="tile" fill="{_colour(number)}" x="{left:.1f}" '
        f'y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>{text}</g>'
    )


def _run(run: RunContents) -> Iterator[str]:
    yield f"<p>{_text(run.summary())}</p>"
    whole = [one for one in run.steps if one.kind == "committed"]
    charts = []
    for name in dict.fromkeys(name for one in whole for name in one.saved.metrics):
        points = [(one.step, one.saved.metrics[name]) for one in whole if name in one.saved.metrics]
        charts.append(_chart(name, points, "{:.4g}"))
    charts.append(_chart("MiB of each step", [(one.step, one.nbytes / (1 << 20)) for one in whole], "{:.1f}"))
    blocked = [(one.step, one.record.blocked_seconds) for one in whole if one.record is not None]
    charts.append(_chart("seconds that saves blocked", blocked, "{:.3g}"))
    yield f"<h2>Over the steps</h2><div class=grid>{''.join(charts)}</div><h2>Steps</h2>"
    rows = []
    for one in run.steps[-_MOST_ROWS:]:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.saved.metrics.items())
        time = "" if one.saved.time is None else one.saved.time.isoformat(sep=" ", timespec="seconds")
        state = "" if one.kind == "committed" else f"{one.kind} {one.flaw or ''}"
        rows.append((str(one.step), time, format_bytes(one.nbytes), metrics, state))
    yield _table(("step", "committed", "bytes", "metrics", "state"), rows, right={0, 2}, bad={4}) + _cut(len(run.steps))


def _chart(title: str, points: Sequence[tuple[int, float]], form: str) -> str:
    """Return a small line chart; nothing if there are no points."""
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)

    def place(step: int, value: float) -> str:
        x = 10 + 220 * (step - steps[0]) / ((steps[-1] - steps[0]) or 1)
        y = 80 - 60 * (value - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    dots = "".join(
        f'<circle class="dot" r="3" cx="{place(step, value).split(",")[0]}" cy="{place(step, value).split(",")[1]}">'
        f"<title>step {step}: {form.format(value)}</title></circle>"
        for step, value in points[-_MOST_BOXES:]
    )
    return (
        f"<div class=card><b>{_text(title)}</b>"
        f'<svg viewBox="0 0 240 105" role="img" aria-label="{_text(title)}">'
        f'<line class="axis" x1="10" y1="88" x2="230" y2="88"/><polyline class="curve" points="{line}"/>{dots}'
        f'<text x="10" y="101">{steps[0]}</text><text x="230" y="101" text-anchor="end">{steps[-1]}</text>'
        f'<text x="230" y="12" text-anchor="end">{form.format(low)} to {form.format(high)}</text></svg></div>'
    )


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[int] | set[int] = frozenset(),
    keys: frozenset[int] | set[int] = frozenset(),
    bad: frozenset[int] | set[int] = frozenset(),
) -> str:
    def kind(number: int) -> str:
        names = [name for name, numbers in (("n", right), ("key", keys), ("bad", bad)) if number in numbers]
        return f' class="{" ".join(names)}"' if names else ""

    top = "".join(f"<th{kind(n) if n in right else ''}>{_text(cell)}</th>" for n, cell in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(n)}>{_text(cell)}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _cut(count: int) -> str:
    return f"<p class=faint>{count - _MOST_ROWS:,} more lines are left out.</p>" if count > _MOST_ROWS else ""


def _colour(number: int) -> str:
    """Return a light colour on which dark text can be read, in either scheme."""
    return f"hsl({number * 47 % 360} 55% 74%)"


def _text(value: object) -> str:
    return html.escape(shown(value))
