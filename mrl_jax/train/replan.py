"""New shares of the devices between rounds, from measured times."""

from collections.abc import Sequence

from mrl_jax import config as config_lib
from mrl_jax.train import placement, rounds, turn


def shares(
  run_: turn.Run,
  measured: dict[str, list[dict[str, float]]],
  cursor: rounds.Cursor,
) -> rounds.Cursor:
  """New shares from the rounds since the last plan, without the first."""
  seconds = {}
  for name, phases in measured.items():
    used = phases[1:] or phases  # the first one compiles
    seconds[name] = {
      key: sum(p[key] for p in used) / len(used) for key in used[0]
    }
  plan = placement.plan(run_.config, run_.policies, run_.states, seconds)
  old = tuple(policy.mesh.size for policy in run_.policies)
  shown = ", ".join(
    f"{policy.name} {share}"
    for policy, share in zip(run_.policies, plan.devices, strict=True)
  )
  if plan.mode != "partition" or tuple(plan.devices) == old:
    run_.hooks.message(f"round {cursor.round}: shares stay; {plan.reason}")
    return cursor
  measured.clear()
  try:
    move(run_, plan.devices)
  except config_lib.ConfigError as error:
    run_.hooks.message(f"round {cursor.round}: cannot move: {error}")
    return cursor
  run_.hooks.message(f"round {cursor.round}: devices {shown}; {plan.reason}")
  return cursor._replace(shares=tuple(plan.devices))


def move(run_: turn.Run, shares: Sequence[int]) -> None:
  """Moves policies and states to other shares of the devices."""
  run_.policies, run_.states = placement.move(
    run_.config, run_.policies, run_.states, shares
  )
