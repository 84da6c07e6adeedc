"""Imports point down, the host side needs no JAX, files stay short."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = (
  (
    *("types", "compose", "named", "records"),
    *("config", "config_checks", "config_error", "config_files"),
    *("config_fields", "config_methods", "config_names"),
  ),
  ("kernels", "text", "tasks", "parallel", "collate", "measure"),
  ("model", "transforms"),
  ("losses", "diagnostics", "exchange", "explore", "shaping"),
  ("sampling",),
  ("recipes", "recipe_config"),
  ("train",),
)
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
SOURCES = sorted((ROOT / "mrl_jax").rglob("*.py"))


def imports(path):
  """The parts of mrl_jax that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
      continue
    for name in names:
      if name.startswith("mrl_jax."):
        yield name.split(".")[1]
      else:
        assert not name.startswith("experiments"), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.name))
def test_imports_point_down(path):
  part = path.relative_to(ROOT / "mrl_jax").parts[0].removesuffix(".py")
  if part == "__init__":
    assert not list(imports(path))
    return
  for other in imports(path):
    assert LEVEL[other] <= LEVEL[part], f"{path} imports {other}"


@pytest.mark.parametrize("folder", ["text", "tasks", "exchange"])
def test_the_host_side_imports_no_jax(folder):
  modules = [
    f"mrl_jax.{folder}.{path.stem}"
    for path in (ROOT / "mrl_jax" / folder).glob("*.py")
    if path.stem not in ("__init__", "mathematics", "gym", "worker")
  ]
  code = f"import {', '.join(modules)}, sys; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
  "path", SOURCES + sorted((ROOT / "experiments").rglob("*.py")), ids=str
)
def test_files_stay_short(path):
  assert len(path.read_text().splitlines()) <= 320
