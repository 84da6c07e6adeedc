"""Which devices each policy has, and the plan that moves them.

Policies that take turns have all devices each; policies that run at once
have disjoint runs of devices. A plan from measured phase times may change
the shares between rounds: parameters and optimiser states move, and nothing
else about a policy does.
"""

from collections.abc import Mapping, Sequence

import jax

from mrl_jax import config as config_lib
from mrl_jax.parallel import allocate, processes
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib


def shares(
  config: config_lib.Config, devices: int, platform: str = ""
) -> tuple[int, ...]:
  """Devices of each policy at the start.

  Args:
    config: of the run.
    devices: how many there are.
    platform: of them; "" is that of this machine.

  Raises:
    ConfigError: more than there are, or a share that a TPU does not take.
  """
  even = (platform or jax.default_backend()) == "tpu"
  found = _shares(config, devices, even)
  if even and any(devices % share for share in found):
    raise config_lib.ConfigError(
      "shares",
      found,
      f"must each divide the {devices} devices: a TPU's compiler takes no "
      "other part of a slice",
    )
  return found


def _shares(
  config: config_lib.Config, devices: int, even: bool
) -> tuple[int, ...]:
  count = len(config.policies)
  if config.shares:
    if max(config.shares) > devices:
      raise config_lib.ConfigError(
        "shares", config.shares, f"there are {devices} devices"
      )
    if config.executor == "partition" and sum(config.shares) > devices:
      raise config_lib.ConfigError(
        "shares", config.shares, f"must add up to at most {devices} devices"
      )
    return config.shares
  if config.executor == "inline":
    return (devices,) * count
  if devices < count:
    raise config_lib.ConfigError(
      "executor",
      config.executor,
      f"{count} policies need at least {count} devices, there are {devices}; "
      "use inline",
    )
  share = devices // count
  while even and devices % share:
    share -= 1
  return (share,) * count


def meshes(
  config: config_lib.Config, shares_: Sequence[int]
) -> list[jax.sharding.Mesh]:
  """A mesh for each policy: disjoint ones where there are enough devices.

  Raises:
    ConfigError: --mesh does not fit a share, the prompts do not, or a
      process has no device of a policy.
  """
  devices = jax.devices()
  apart = sum(shares_) <= len(devices)
  start, found = 0, []
  for share in shares_:
    mine = devices[start : start + share] if apart else devices[:share]
    start += share
    if len({device.process_index for device in mine}) < processes.count():
      raise config_lib.ConfigError(
        "shares",
        tuple(shares_),
        "each policy needs devices of every process; leave it out",
      )
    try:
      found.append(mesh_lib.make(*config.mesh, devices=mine))
    except ValueError as error:
      raise config_lib.ConfigError("mesh", config.mesh, str(error)) from None
    check_prompts(config, found[-1])
  return found


def check_prompts(config: config_lib.Config, mesh: jax.sharding.Mesh) -> None:
  """A microbatch's prompts must spread evenly over the devices."""
  spread = mesh.shape["data"] * mesh.shape["fsdp"]
  prompts = _microbatch(config)
  if prompts % spread:
    raise config_lib.ConfigError(
      "mesh",
      config.mesh,
      f"data times fsdp is {spread} and must divide the {prompts} prompts of "
      "a microbatch (--prompts / --updates / --microbatches)",
    )


def _microbatch(config: config_lib.Config) -> int:
  """Prompts of a microbatch."""
  return config.prompts // config.updates // config.microbatches


def plan(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  states: Mapping[str, state_lib.TrainState],
  seconds: Mapping[str, Mapping[str, float]],
) -> allocate.Allocation:
  """Shares from the measured seconds of each policy's phases."""
  costs = []
  for policy in policies:
    phases = seconds[policy.name]
    leaves = jax.tree.leaves(states[policy.name])
    costs.append(
      allocate.Cost(
        name=policy.name,
        generate=phases["generate"] + phases["verify"],
        score=0.0,  # timed within the update
        update=phases["update"],
        devices=policy.mesh.size,
        tensor=policy.mesh.shape["tensor"],
        resident_bytes=sum(leaf.nbytes for leaf in leaves),
        rows=_microbatch(config),
      )
    )
  devices = jax.devices()
  limit = (devices[0].memory_stats() or {}).get("bytes_limit")
  even = devices[0].platform == "tpu"
  return allocate.plan(costs, len(devices), limit, even=even)


def move(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  states: Mapping[str, state_lib.TrainState],
  shares_: Sequence[int],
) -> tuple[list[policy_lib.Policy], dict[str, state_lib.TrainState]]:
  """The policies and states on new shares of the devices."""
  moved, placed = [], {}
  for policy, mesh in zip(policies, meshes(config, shares_), strict=True):
    policy, state = policy_lib.move(config, policy, states[policy.name], mesh)
    moved.append(policy)
    placed[policy.name] = state
  return moved, placed
