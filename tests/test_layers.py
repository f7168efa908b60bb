"""Layering test: a package may import only packages below it, and files do not import each other in a cycle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {
    "sharding": [
        {"errors"},
        {"matrices", "rng", "transport", "validation"},
        {"modules", "terms"},
        {"layers"},
        {"factorization"},
        {"rounds"},
        {"client_sampling", "flower", "recipes"},
        {"__init__"},
    ],
    "train": [
        {"data", "utils"},
        {"registries"},
        {"config"},
        {"engines"},
        {"experiment"},
        {"rundir"},
        {"__init__", "report"},
        {"callbacks"},
        {"rounds"},
        {"variants"},
        {"run"},
        {"federate"},
        {"cli"},
        {"__main__"},
    ],
}


def package_of(package, path):
    inside = path.relative_to(ROOT / package)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported(package, path):
    """Return the modules of the package that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            module = node.module.partition(".")[2]
            names = [".".join(filter(None, (module, alias.name))) for alias in node.names]
            yield from [module, *names] if module else names


@pytest.mark.parametrize("package", LAYERS)
def test_packages_of_each_layer_import_only_from_layers_below(package):
    layer_of = {name: layer for layer, names in enumerate(LAYERS[package]) for name in names}
    files = list((ROOT / package).rglob("*.py"))
    assert {package_of(package, path) for path in files} == layer_of.keys()
    imports = {
        (package_of(package, path), name.partition(".")[0]) for path in files for name in imported(package, path)
    }
    assert {(a, b) for a, b in imports if a != b and layer_of[a] <= layer_of.get(b, -1)} == set()


@pytest.mark.parametrize("package", LAYERS)
def test_imports_of_files_have_no_cycle(package):
    below = {}
    for path in (ROOT / package).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / package).with_suffix("").parts)
        needs = {
            module for module in imported(package, path) if (ROOT / package / f"{module.replace('.', '/')}.py").exists()
        }
        below[name] = needs - {name}
    while below:
        free = {name for name, needs in below.items() if not needs & below.keys()}
        assert free, f"a cycle among {sorted(below)}"
        below = {name: needs for name, needs in below.items() if name not in free}


@pytest.mark.parametrize(("package", "above"), [("sharding", "models"), ("sharding", "train"), ("models", "train")])
def test_top_level_packages_import_in_one_direction(package, above):
    assert [path for path in (ROOT / package).rglob("*.py") if list(imported(above, path))] == []
