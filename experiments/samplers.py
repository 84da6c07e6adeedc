"""Which engine draws a run's completions."""

from mrl_jax import config as config_lib
from mrl_jax import named
from mrl_jax.sampling import engine
from mrl_jax.train import policy as policy_lib


def load(config: config_lib.Config) -> policy_lib.Sampler:
  """The function that makes the sampler: the own one, or the named one."""
  if not config.sampler:
    return engine.make
  try:
    return named.find("sampler", config.sampler)
  except ValueError as error:
    raise config_lib.ConfigError(
      "sampler", config.sampler, str(error)
    ) from None
