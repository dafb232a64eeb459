# ruff: noqa: INP001 - a script
"""Draw what imports what inside each package, and the layers of packages, as SVG pictures.

uv run python packages/accel-suite/docs/src/package_graphs.py packages/accel-suite/docs/pictures
"""

import sys
from pathlib import Path

import grimp
import matplotlib.pyplot as plt
import networkx as nx

PACKAGES = (
    "accel_state",
    "accel_ops",
    "accel_bigmodel",
    "accel_quant",
    "accel_plugins",
    "accel_trackers",
    "accel_train",
    "accel_cli",
    "accel_compat",
)
LAYERS = (
    ("accel_state",),
    ("accel_ops",),
    ("accel_bigmodel",),
    ("accel_plugins", "accel_quant", "accel_trackers"),
    ("accel_train",),
    ("accel_cli",),
    ("accel",),
    ("accel_compat",),
)
FILL, FOLDER, EDGE = "#dbe7f5", "#f6dfc4", "#7a8794"


def parts_of(imports: grimp.ImportGraph, package: str) -> nx.DiGraph:
    """The modules and folders right below a package, and which imports which."""
    graph = nx.DiGraph()
    depth = package.count(".") + 1

    def part(module: str) -> str | None:
        names = module.split(".")
        return names[depth] if module.startswith(f"{package}.") and len(names) > depth else None

    for module in imports.modules:
        name = part(module)
        if name is None or name.startswith("_"):
            continue
        graph.add_node(name)
        if len(module.split(".")) > depth + 1:
            graph.nodes[name]["folder"] = True
        for imported in imports.find_modules_directly_imported_by(module):
            other = part(imported)
            if other is not None and other != name and not other.startswith("_"):
                graph.add_edge(name, other)
    return graph


def draw(graph: nx.DiGraph, path: Path, *, width: float = 10) -> None:
    """Arrows point to what is imported; what imports nothing of the package is at the bottom."""
    graph = nx.transitive_reduction_of(graph) if False else graph
    for level, names in enumerate(nx.topological_generations(graph.reverse())):
        for name in names:
            graph.nodes[name]["level"] = level
    positions = nx.multipartite_layout(graph, subset_key="level", align="horizontal")
    levels = 1 + max(graph.nodes[name]["level"] for name in graph)
    figure, axes = plt.subplots(figsize=(width, 0.9 * levels + 0.4))
    nx.draw_networkx_edges(graph, positions, ax=axes, edge_color=EDGE, width=0.8, node_size=1800, alpha=0.7)
    for name, (x, y) in positions.items():
        color = FOLDER if graph.nodes[name].get("folder") else FILL
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": EDGE}
        axes.text(x, y, name, ha="center", va="center", fontsize=8, bbox=box)
    axes.margins(0.12, 0.08)
    axes.axis("off")
    figure.savefig(path, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
