"""One's own functions, named on the command line as `module:function`."""

import difflib
import importlib
from typing import Any


def find(field: str, spec: str, also: tuple[type, ...] = ()) -> Any:
  """The function that `module:name` says, or a value of a type in `also`.

  `field` is the word for it in errors.

  Raises:
    ValueError: it is not of that form, or not there; says what is.
  """
  module, _, name = spec.partition(":")
  if not name or not all(part.isidentifier() for part in module.split(".")):
    raise ValueError(f"{field} must be module:function, got {spec!r}")
  try:
    found = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(f"{field} {spec!r}: {error}") from None
  value = getattr(found, name, None)
  if not (callable(value) or isinstance(value, also)):
    there = [n for n in dir(found) if not n.startswith("_")]
    close = difflib.get_close_matches(name, there, 5) or there[:10]
    raise ValueError(
      f"{field} {spec!r}: {module} has no function {name!r}; it has {close}"
    )
  return value
