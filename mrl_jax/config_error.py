"""The one error of a configuration, and how a value is shown."""

from typing import Any


class ConfigError(ValueError):
  """A field that cannot be used: its name, its value, what is allowed."""

  def __init__(self, field: str, value: Any, allowed: str):
    super().__init__(f"--{field}={show(value)}: {allowed}")
    self.field = field


def show(value: Any) -> str:
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return str(value)
