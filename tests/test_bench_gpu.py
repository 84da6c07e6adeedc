"""The GPU script where there is no GPU: what it would time, and how it ends."""

import dataclasses
import json
import sys

import pytest

from experiments import bench, bench_gpu
from mrl_jax.model import catalog
from tests import runs


def test_the_shape_is_the_catalogues_model():
  for name in bench_gpu.names()[1:]:
    shape = bench_gpu.shape_of(name, quick=False)
    found = bench.model_spec(shape, "bfloat16", "dots")
    wanted = catalog.get(name)
    same = {f: getattr(wanted, f) for f in ("max_positions",)}
    same |= {"compute_dtype": "float32", "remat": "none"}
    assert dataclasses.replace(found, **same) == wanted
  assert "qwen3-0.6b" in bench_gpu.names()
  quick = bench_gpu.shape_of("qwen3-0.6b", quick=True)
  full = bench_gpu.shape_of("qwen3-0.6b", quick=False)
  assert quick.prompts < full.prompts
  assert quick.prompts % 8 == 0  # its default of microbatches


@pytest.mark.parametrize(
  ("kind", "rate"),
  [
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H20", 148e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ("NVIDIA A10G", 70e12),
    ("NVIDIA L4", 121e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L40", 181e12),
    ("NVIDIA GB200", 2500e12),
    ("Tesla T4", None),
    ("cpu", None),
  ],
)
def test_peaks(kind, rate):
  assert bench_gpu.peak(kind) == rate


def test_work_is_that_of_the_parameters():
  shape = bench_gpu.shape_of("qwen3-0.6b", quick=False)
  spec = bench.model_spec(shape, "bfloat16", "dots")
  work = bench_gpu.work(spec, shape)
  # 2 N per token, N without the embedding's rows: within the attention.
  layers = 440_401_920
  rows = shape.prompts * shape.samples
  completion = rows * shape.completion_length
  tokens = shape.prompts * shape.prompt_length + completion
  products = 2 * layers * tokens + 2 * spec.vocab * spec.width * completion
  assert products < work["scoring"] < 1.2 * products
  assert work["training"] == 3 * work["scoring"]
  # The sampler decodes what the scorer reads, but for the last token.
  assert 0.98 * work["scoring"] < work["sampling"] < work["scoring"]


def test_rates():
  out = bench_gpu.rates({"wall": {"median": 2.0}}, 100, 10**12, 1e12)
  assert out["tokens_per_second"] == 50
  assert out["tflops_per_second"] == out["of_peak"] == 0.5
  out = bench_gpu.rates({"wall": {"median": 2.0}}, 100, 10**12, None)
  assert "of_peak" not in out


def test_it_runs_on_a_cpu_with_a_tiny_model(tmp_path):
  path = tmp_path / "out.json"
  flags = ["--spec=tiny", "--quick", "--notests", "--remat=none"]
  flags.append("--microbatches=1")
  command = [sys.executable, "-m", "experiments.bench_gpu", *flags]
  done = runs.run([*command, f"--out={path}"])
  assert done.returncode == 0, done.stdout + done.stderr
  out = json.loads(path.read_text())
  assert "unknown for 'cpu'" in out["peak"]
  for name in ("sampling", "scoring", "training"):
    assert out[name]["tokens_per_second"] > 0
    assert "of_peak" not in out[name]
    assert f"{name}: " in done.stdout


def test_microbatches_that_do_not_fit_are_one_line():
  command = [sys.executable, "-m", "experiments.bench_gpu", "--spec=tiny"]
  done = runs.run([*command, "--microbatches=3"])
  assert done.returncode == 2
  assert done.stderr == "error: --microbatches=3: must divide the 4 prompts\n"


def test_a_part_may_fail_and_none_is_started_late(tmp_path):
  path = tmp_path / "out.json"
  report = bench_gpu.Report(str(path))
  clock = iter([0, 1, 2, 3])

  def wrong():
    raise MemoryError("27 GB")

  def kept():  # what was measured is on disk before the next part begins
    return json.loads(path.read_text())

  timed = {"one": lambda: {"a": 1}, "two": wrong, "three": kept, "four": wrong}
  well = bench_gpu.measure(
    report,
    timed,
    lambda name, out: {"name": name, **out},
    lambda: next(clock) == 3,
  )
  assert not well
  out = json.loads(path.read_text())
  assert out["one"] == {"name": "one", "a": 1}
  assert out["two"] == "failed: MemoryError: 27 GB"
  assert out["three"] == {"name": "three", "one": out["one"], "two": out["two"]}
  assert out["four"] == "not started: --budget is used up"
  assert bench_gpu.measure(report, {}, lambda *_: {}, lambda: False)


def test_tests_that_fail_or_hang_are_reported(monkeypatch, tmp_path):
  (tmp_path / "tests").mkdir()
  test = tmp_path / "tests" / "test_gpu.py"
  (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
  monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
  text = "import os, pytest, time\n@pytest.mark.gpu\ndef test_it(): "
  test.write_text(text + "assert os.environ['MRL_TEST_GPU'] == '2'\n")
  out = bench_gpu.tests(60)
  assert not out["passed"] and "'1' == '2'" in out["said"]
  test.write_text(text + "time.sleep(60)\n")
  assert bench_gpu.tests(1) == {"passed": False, "said": "not done in 1 s"}
