"""The table of the sweep, summed up or as a table that can be searched.

    ```{verdicts}
    :summary:
    ```

Without the option: every operator, module and optimizer. It is one piece of
HTML without a network, with cards in the place of columns on a phone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from html import escape

import marks
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

sys.path.append(str(marks.ROOT / "tests"))

from sweep import table

SIGNS = dict(zip(table.VERDICTS, "✓⊘↩✗✗", strict=True))
MODES = ["forward", "backward", "in-place", "out"]
STYLE = """
.verdicts { font-size: .8rem; margin: 1rem 0; }
.verdicts form { display: flex; flex-wrap: wrap; gap: .5rem; }
.verdicts input { flex: 1 1 12rem; }
.verdicts input, .verdicts select { font: inherit; padding: .3rem .5rem;
  color: inherit; background: transparent; border: 1px solid #7f7f7f; }
.verdicts option { color: #000; background: #fff; }
.verdicts table { width: 100%; border-collapse: collapse; }
.verdicts th, .verdicts td { text-align: left; vertical-align: top;
  padding: .15rem .4rem; border-bottom: 1px solid #7f7f7f55; }
.verdicts td { overflow-wrap: anywhere; }
.verdicts summary { white-space: nowrap; cursor: pointer; }
.verdicts b { font-weight: bold; }
.verdicts .native, .verdicts .refused { color: #2e9e5b; }
.verdicts .falls { color: #b97c00; }
.verdicts .wrong, .verdicts .crash { color: #d0342c; }
@media (max-width: 45em) {
  .verdicts thead { display: none; }
  .verdicts tr, .verdicts td { display: block; border: 0; padding: 0; }
  .verdicts tr { border-bottom: 1px solid #7f7f7f55; padding: .4rem 0; }
  .verdicts td[data-mode]::before { content: attr(data-mode) " ";
    float: left; margin-right: .5rem; opacity: .7; }
  .verdicts tr[hidden] { display: none; }
}
"""
# Words are all to be found, in a name, a dtype, a category, an ATen operator.
SCRIPT = """
document.querySelectorAll(".verdicts").forEach(function (box) {
  var text = box.querySelector("input"), kind = box.querySelector("select");
  var rows = Array.from(box.querySelectorAll("tbody tr"));
  rows.forEach(function (row) { row.found = row.textContent.toLowerCase(); });
  function show() {
    var words = text.value.toLowerCase().split(/\\s+/), count = 0;
    rows.forEach(function (row) {
      row.hidden = !words.every(function (w) { return row.found.includes(w); })
        || (kind.value && !row.querySelector("." + kind.value));
      count += !row.hidden;
    });
    box.querySelector("output").textContent = count + " of " + rows.length;
  }
  box.querySelector("form").addEventListener("input", show);
  box.querySelector("form").addEventListener("submit", function (event) {
    event.preventDefault();
  });
  show();
});
"""


class Verdicts(SphinxDirective):
    option_spec = dict.fromkeys(["summary"], directives.flag)

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(table.COVERAGE))
        found = table.read()
        if "summary" in self.options:
            return self.parse_text_to_nodes(summary(found))
        return [nodes.raw("", page(found), format="html")]


def summary(found: table.Table) -> str:
    """Percent of the calls by category, in Markdown."""
    shares = {mode: table.summary(found, mode) for mode in (None, *MODES)}
    total = shares.pop(None)
    rows = [["", "calls", "correct", *(f"{m}, native" for m in shares)]]
    rows.append(["---", *["--:"] * (len(rows[0]) - 1)])
    for name in sorted(total, key=lambda name: (name == "all", name)):
        parts = [shares[mode].get(name) for mode in shares]
        rows.append([
            f"**{name}**" if name == "all" else name,
            f"{total[name].calls}",
            percent(total[name].correct),
            *(percent(p.without_fallback) if p else "" for p in parts),
        ])  # fmt: skip
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def percent(number: float) -> str:
    """Rounded down: 100 % means all. The space does not break."""
    return f"{int(number * 10) / 10:.1f}\N{NO-BREAK SPACE}%"


def page(found: table.Table) -> str:
    """One row a name, one column a mode; a click shows the dtypes."""
    names: dict[str, dict] = defaultdict(lambda: defaultdict(dict))
    for (name, mode, dtype), cell in found.cells.items():
        names[name][mode][dtype] = cell
    body = "".join(
        row(name, found.categories[name], names[name])
        for name in sorted(names, key=lambda n: (found.categories[n], n))
    )
    heads = "".join(f"<th>{head}</th>" for head in ["", *MODES, "other"])
    kinds = "".join(
        f'<option value="{verdict.split()[0]}">{sign} {verdict}</option>'
        for verdict, sign in SIGNS.items()
    )
    return (
        f'<div class="verdicts"><style>{STYLE}</style><form role="search">'
        '<input type="search" aria-label="Search" placeholder="name, dtype, '
        'category, ATen operator"><select aria-label="Verdict">'
        f'<option value="">every verdict</option>{kinds}</select>'
        f"<output></output></form><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table><script>{SCRIPT}</script></div>"
    )


def row(name: str, category: str, modes: dict[str, dict]) -> str:
    head = f"<td><b>{escape(name)}</b> <small>{escape(category)}</small></td>"
    cells = [cell(mode, modes.get(mode)) for mode in MODES]
    rest = [cell(mode, modes[mode]) for mode in modes if mode not in MODES]
    rest = [
        part.replace("<td", "<div", 1).replace("</td>", "</div>")
        for part in rest
    ]
    return f"<tr>{head}{''.join(cells)}<td>{''.join(rest)}</td></tr>"


def cell(mode: str, dtypes: dict | None) -> str:
    """The worst verdict; behind it, which dtypes have which."""
    if not dtypes:
        return "<td></td>"
    worst = max(dtypes.values(), key=lambda c: table.rank(c, True)).verdict
    groups = defaultdict(list)
    for dtype, found in dtypes.items():
        groups[found.verdict, table.tell(found)].append(dtype)
    lines = "".join(
        f'<div><b class="{verdict.split()[0]}">{SIGNS[verdict]}</b> '
        f"<small>{' '.join(names)}: {escape(text)}</small></div>"
        for (verdict, text), names in sorted(groups.items())
    )
    count = f" {len(dtypes)}" if len(groups) == 1 else ""
    other = f" {mode}" * (mode not in MODES)
    return (
        f'<td data-mode="{mode}"><details><summary><b class='
        f'"{worst.split()[0]}">{SIGNS[worst]}</b>{count}{other}</summary>'
        f"{lines}</details></td>"
    )


def setup(app):
    app.add_directive("verdicts", Verdicts)
    return {"version": "1", "parallel_read_safe": True}
