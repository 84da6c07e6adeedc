"""The command line, generated from the fields of `Config`.

One flag per field, with its help text and allowed values. Mistakes are one
line on standard error and exit code 2. `--flagfile` nests; the flags of a
run are saved in its folder as `run.flags`, which reproduces it.
"""

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterable, Sequence

from absl import app, flags, logging

from mrl_jax import config as config_lib


def define(fields: Sequence[str] | None = None) -> None:
  """Defines a flag for each named field of `Config`; None is all."""
  for field in dataclasses.fields(config_lib.Config):
    if fields is None or field.name in fields:
      _define(field)
      show(field.name)


def show(*names: str) -> None:
  """Makes --help print flags that another module than the main one defines."""
  for name in names:
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def _define(field: dataclasses.Field) -> None:
  text, names = field.metadata["help"], field.metadata["names"]
  default = field.default
  if names:
    text = f"{text} One of: {', '.join(names)}."
  if isinstance(default, bool):
    flags.DEFINE_boolean(field.name, default, text)
  elif isinstance(default, int):
    flags.DEFINE_integer(field.name, default, text)
  elif isinstance(default, float):
    flags.DEFINE_float(field.name, default, text)
  elif isinstance(default, str):
    flags.DEFINE_string(field.name, default, text)
  else:
    flags.DEFINE_list(field.name, [str(item) for item in default], text)


def config(
  fields: Iterable[str] | None = None,
  base: config_lib.Config | None = None,
) -> config_lib.Config:
  """The validated configuration of the parsed flags.

  Args:
    fields: those to take from the flags; None is all.
    base: where the others come from.
  """
  values = {}
  for field in dataclasses.fields(config_lib.Config):
    if fields is not None and field.name not in fields:
      continue
    value = flags.FLAGS[field.name].value
    if isinstance(field.default, tuple):
      value = _items(field, value)
    values[field.name] = value
  if base is None:
    return config_lib.Config(**values)
  return dataclasses.replace(base, **values)


def _items(field: dataclasses.Field, value: Sequence[str]) -> tuple:
  kind = typing.get_args(field.type)[0]  # the field may be empty by default
  try:
    return tuple(kind(item) for item in value if item != "")
  except ValueError:
    raise config_lib.ConfigError(
      field.name, tuple(value), f"must be a list of {kind.__name__}"
    ) from None


def save(config_: config_lib.Config, path) -> None:
  """Writes the configuration as a flagfile."""
  lines = []
  for field in dataclasses.fields(config_lib.Config):
    value = getattr(config_, field.name)
    if isinstance(value, tuple):
      value = ",".join(map(str, value))
    if isinstance(value, bool):
      value = str(value).lower()
    lines.append(f"--{field.name}={value}\n")
  path.write_text("".join(lines))


def run(main: Callable[..., int | None], arguments: int = 0) -> None:
  """Parses the flags, runs `main`, and turns bad input into one line.

  `main` is given up to `arguments` words of the command line.
  """

  def wrapped(argv: Sequence[str]) -> int | None:
    logging.set_verbosity(logging.WARNING)
    if len(argv) > 1 + arguments:
      found = argv[1 + arguments]
      fail(f"{found!r}: unexpected argument; flags start with --")
    try:
      return main(*argv[1:])
    except config_lib.ConfigError as error:
      fail(str(error))

  app.run(wrapped, flags_parser=_parse)


def fail(message: str) -> None:
  """One line on standard error, exit code 2."""
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    fail(str(error))
