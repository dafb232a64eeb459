# ruff: noqa: INP001 - a script
"""Draw which packages need which, and which part of each imports which, as pictures of docs/packages.

Of imports that follow from others (a imports b and c, b imports c) only the longest chain is drawn.

uv run python packages/accel-suite/docs/src/package_graphs.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import grimp
import networkx as nx
from matplotlib import rc_context
from matplotlib.figure import Figure

PACKAGES = (
    "accel_state",
    "accel_ops",
    "accel_bigmodel",
    "accel_plugins",
    "accel_trackers",
    "accel_train",
    "accel_cli",
    "accel_convert",
    "accel_inspect",
    "accel_compat",
)
PICTURES = Path(__file__).resolve().parents[1] / "pictures"
FILL, FOLDER, EDGE = "#dbe7f5", "#f6dfc4", "#9aa5b1"
IN_A_ROW = 6
NOT_DRAWN = {
    line
    for contract in tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())[
        "tool"
    ]["importlinter"]["contracts"]
    for line in contract.get("ignore_imports", ())
}
"""Imports by which two parts need each other, though none of their modules do."""


def parts_of(imports: grimp.ImportGraph, package: str) -> nx.DiGraph[str]:
    """The modules and folders right below a package; an edge leads to what is imported."""
    graph: nx.DiGraph[str] = nx.DiGraph()

    def part(module: str) -> str | None:
        names = module.split(".")
        is_inside = names[0] == package and len(names) > 1 and not names[1].startswith("_")
        return names[1] if is_inside else None

    for module in imports.modules:
        name = part(module)
        if name is None:
            continue
        graph.add_node(name)
        graph.nodes[name]["is_folder"] = graph.nodes[name].get("is_folder", False) or module.count(".") > 1
        for imported in imports.find_modules_directly_imported_by(module):
            other = part(imported)
            if other is not None and other != name and f"{module} -> {imported}" not in NOT_DRAWN:
                graph.add_edge(name, other)
    return graph


def needs() -> nx.DiGraph[str]:
    """The packages; an edge leads to what is declared as a dependency."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for path in Path(__file__).resolve().parents[3].glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        graph.add_node(project["name"], is_folder=False)
        for dependency in project["dependencies"]:
            if found := re.match(r"accel-\w+", dependency):
                graph.add_edge(project["name"], found[0])
    return graph


def positions_of(graph: nx.DiGraph[str]) -> dict[str, tuple[float, float]]:
    """What imports nothing of the package is at the bottom, at most `IN_A_ROW` side by side.

    A row is sorted by where the imported are, so that fewer arrows cross.
    """
    positions: dict[str, tuple[float, float]] = {}
    height = 0
    for generation in nx.topological_generations(graph.reverse()):
        names = sorted(
            generation,
            key=lambda name: (_center([positions[other][0] for other in sorted(graph[name])]), name),
        )
        for start in range(0, len(names), IN_A_ROW):
            row = names[start : start + IN_A_ROW]
            for index, name in enumerate(row):
                positions[name] = (index - (len(row) - 1) / 2 + 0.13 * (height % 2), height)
            height += 1
    return positions


def _center(places: list[float]) -> float:
    return sum(places) / max(1, len(places))


def draw(graph: nx.DiGraph[str], path: Path) -> None:
    """Write the picture of a package."""
    positions = positions_of(graph)
    shown = nx.transitive_reduction(graph)
    rows = 1 + max(height for _, height in positions.values())
    figure = Figure(figsize=(8, 0.72 * rows + 0.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name, other in sorted(shown.edges):
        arrow = {"arrowstyle": "->", "color": EDGE, "lw": 0.8, "shrinkA": 9, "shrinkB": 9}
        axes.annotate("", xy=positions[other], xytext=positions[name], arrowprops=arrow)
    for name, (x, y) in positions.items():
        color = FOLDER if graph.nodes[name]["is_folder"] else FILL
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": EDGE}
        axes.text(
            x,
            y,
            name.replace("_", "_\n") if len(name) > 13 else name,
            ha="center",
            va="center",
            fontsize=9,
            bbox=box,
        )
    axes.set_xlim(-IN_A_ROW / 2 - 0.1, IN_A_ROW / 2 + 0.2)
    axes.set_ylim(-0.6, rows - 0.4)
    axes.axis("off")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw all."""
    draw(needs(), PICTURES / "packages.svg")
    imports = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    for package in PACKAGES:
        draw(parts_of(imports, package), PICTURES / f"{package}.svg")


if __name__ == "__main__":
    main()
