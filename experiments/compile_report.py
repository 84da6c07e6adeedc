"""What experiments.compile prints and writes: tables, records, advice."""

import io
from collections.abc import Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.table

from mrl_jax.parallel import chips, costs
from mrl_jax.train import ahead, forecast

GIB = 2**30
Result = forecast.Forecast | forecast.TooLarge


def head(
  policy: ahead.Policy, mesh: jax.sharding.Mesh, chip: chips.Chip
) -> str:
  """What is compiled."""
  rows, shape = policy.rows, dict(mesh.shape)
  return (
    f"\n{policy.name}: {policy.parameters / 1e9:.2f} B parameters on "
    f"{mesh.size} {chip.name} devices of {chip.memory / GIB:.2f} GiB, mesh "
    f"{','.join(f'{k}={v}' for k, v in shape.items())}, "
    f"{policy.spec.compute_dtype}, remat {policy.spec.remat}, attention "
    f"{policy.spec.attention}; an update of {rows.prompts} prompts x "
    f"{rows.samples} rows, {rows.prompt} + {rows.completion} tokens"
  )


def table(
  policy: ahead.Policy, results: Sequence[Result], chip: chips.Chip
) -> str:
  """Memory and time of each program on one device, and what follows."""
  grid = rich.table.Table(box=rich.box.ASCII2)
  titles = (
    *("program", "HBM GiB", "state", "temporary", "other", "FLOPs"),
    *("x model", "HBM GB", "wire GB", "estimate", "roofline", "share"),
  )
  for title in titles:
    grid.add_column(title, justify="left" if title == "program" else "right")
  for result in results:
    grid.add_row(*_row(result))
  lines = [_rendered(grid)]
  for result in results:
    if isinstance(result, forecast.TooLarge):
      lines.append(_refusal(policy, result, chip))
    else:
      lines += _wire(policy, result)
  done = [r for r in results if isinstance(r, forecast.Forecast)]
  if done and len(done) == len(results):
    lines.append(_summary(policy, done, chip))
  return "\n".join(lines)


def _row(result: Result) -> list[str]:
  if isinstance(result, forecast.TooLarge):
    return [result.program.name, f"{result.bytes / GIB:.2f}", "does not fit"]
  memory, cost = result.memory, result.cost
  state = memory.arguments + memory.beside
  return [
    result.program.name,
    f"{memory.total / GIB:.2f}",
    f"{state / GIB:.2f}",
    f"{memory.temporaries / GIB:.2f}",
    f"{(memory.results + memory.code) / GIB:.2f}",
    f"{result.flops:.3g}",
    f"{result.ratio:.2f}",
    f"{cost.bytes / 1e9:.3g}",
    f"{cost.wire / 1e9:.3g}",
    _seconds(result.seconds),
    f"{_seconds(result.bound)} {result.limit}",
    f"{result.bound / result.seconds:.0%}",
  ]


def _seconds(value: float) -> str:
  return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _wire(policy: ahead.Policy, result: forecast.Forecast) -> list[str]:
  """Collectives by kind, and a warning where logits travel."""
  kinds = sorted(result.cost.by_kind().items(), key=lambda pair: -pair[1])
  told = ", ".join(f"{kind} {count / 1e9:.3g} GB" for kind, count in kinds)
  lines = [f"{result.program.name}: {told or 'no collectives'}"]
  found = logits_that_travel(policy, result)
  if found:
    shapes = {moved.shape.dims for moved in found}
    lines.append(f"  warning: arrays of tokens by vocabulary move: {shapes}")
  return lines


def logits_that_travel(
  policy: ahead.Policy, result: forecast.Forecast
) -> list[costs.Moved]:
  """Collectives of arrays of tokens by vocabulary; there should be none."""
  ways = [2**n for n in range(1, 11)]
  return costs.vocabulary_arrays(
    result.cost, policy.spec.vocab, policy.spec.width, ways
  )


def _refusal(
  policy: ahead.Policy, result: forecast.TooLarge, chip: chips.Chip
) -> str:
  asked, has = result.bytes / GIB, chip.memory / GIB
  state = policy.parameter_bytes + policy.optimizer_bytes
  if state > 0.6 * chip.memory:
    knob = (
      f"parameters and optimiser alone take {state / GIB:.1f} GiB: spread them "
      "over more devices (--mesh fsdp or tensor, a larger --topology)"
    )
  elif result.program.name in ("update", "score"):
    knob = (
      "more --microbatches, --remat=full, or a larger tensor axis in --mesh"
    )
  else:
    knob = "fewer --rows decoding at a time, or a larger tensor axis in --mesh"
  return (
    f"{result.program.name} does not fit: it asks for {asked:.2f} GiB of "
    f"{has:.2f} on each device. Turn: {knob}."
  )


def _summary(
  policy: ahead.Policy, done: Sequence[forecast.Forecast], chip: chips.Chip
) -> str:
  most = max(done, key=lambda result: result.memory.total)
  share = most.memory.total / chip.memory
  seconds = {r.program.name: r.program.calls * r.seconds for r in done}
  told = ", ".join(f"{k} {_seconds(v)}" for k, v in seconds.items())
  return (
    f"fits: {policy.name} needs at most {most.memory.total / GIB:.2f} GiB of "
    f"{chip.memory / GIB:.2f} ({share:.0%}), in {most.program.name}. A round "
    f"is estimated at {_seconds(sum(seconds.values()))}: {told}"
  )


def sweep(found: Sequence[Any], chip: chips.Chip) -> str:
  """The candidates that fit, fastest first, then those that do not."""
  grid = rich.table.Table(box=rich.box.ASCII2)
  for title in ("data,fsdp,tensor", "remat", "microbatches"):
    grid.add_column(title)
  for title in ("HBM GiB", "x model", "estimate", "peak", "limit"):
    grid.add_column(title, justify="right")
  for one in found:
    result = one.result
    known = [",".join(map(str, one.mesh)), one.remat, str(one.microbatches)]
    if isinstance(result, forecast.TooLarge):
      size = f"{result.bytes / GIB:.2f}" if result.bytes else "?"
      grid.add_row(*known, size, "", "does not fit", "", "")
      continue
    grid.add_row(
      *known,
      f"{result.memory.total / GIB:.2f}",
      f"{result.ratio:.2f}",
      _seconds(result.seconds),
      f"{result.ideal / result.seconds:.0%}",
      result.limit,
    )
  return _rendered(grid) + f"\nof {chip.memory / GIB:.2f} GiB on each device"


def _rendered(grid: rich.table.Table) -> str:
  text = io.StringIO()
  rich.console.Console(file=text, width=200).print(grid)
  return text.getvalue().rstrip()


def candidate(one: Any) -> dict[str, Any]:
  """One line of a sweep as JSON values."""
  return {
    "mesh": one.mesh,
    "remat": one.remat,
    "microbatches": one.microbatches,
    **_program(one.result),
  }


def record(
  policy: ahead.Policy, results: Sequence[Result], chip: chips.Chip
) -> dict[str, Any]:
  """One policy as JSON values."""
  return {
    "policy": policy.name,
    "parameters": policy.parameters,
    "parameter_bytes": policy.parameter_bytes,
    "optimizer_bytes": policy.optimizer_bytes,
    "rows": policy.rows._asdict(),
    "dtype": policy.spec.compute_dtype,
    "remat": policy.spec.remat,
    "attention": policy.spec.attention,
    "device": chip._asdict(),
    "programs": {r.program.name: _program(r) for r in results},
  }


def _program(result: Result) -> dict[str, Any]:
  if isinstance(result, forecast.TooLarge):
    return {"fits": False, "asked_bytes": result.bytes}
  return {
    "fits": True,
    "memory": {**result.memory._asdict(), "total": result.memory.total},
    "flops": result.flops,
    "model_flops": result.model_flops,
    "flop_ratio": result.ratio,
    "hbm_bytes": result.cost.bytes,
    "wire_bytes": result.cost.by_kind(),
    "estimated_seconds": result.seconds,
    "roofline_seconds": result.bound,
    "roofline": result.limit,
    "share_of_peak": result.ideal / result.seconds,
    "calls": result.program.calls,
    "compiled_in_seconds": round(result.compiling, 1),
  }
