"""Records as lines of text that anybody can read, and nobody can bend.

A record is one line of JSON: its fields, with arrays as base64 of their
little-endian bytes, and beside them the sha256 of exactly those bytes of the
line. All that a policy publishes in one round is a *shipment*: a first line
that says how much follows, and the records. So a reader can tell a cut file
from a whole one, and a damaged record costs itself alone. Reading never
raises: what cannot be used comes back as the reason why.
"""

import binascii
import hashlib
import json
import math
import operator
import urllib.parse
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from mrl_jax import records as records_lib
from mrl_jax.records import Record

_HEAD, _MIDDLE = b'{"checksum":"', b'","content":'
_JSON = json.JSONEncoder(
  ensure_ascii=False,
  allow_nan=False,
  sort_keys=True,
  separators=(",", ":"),
)
_CLASSES = {
  "trajectory": records_lib.Trajectory,
  "values": records_lib.Values,
  "success": records_lib.Success,
}
_FIELDS = {  # of the content; the header's stand beside the record's own
  kind: frozenset((*records_lib.Header._fields, *class_._fields[1:]))
  for kind, class_ in _CLASSES.items()
}
_ARRAYS = {"tokens": "<i4", "ends": "<i4", "logprobs": "<f4"}
_COUNTS = ("schema", "round", "version", "count")
_FLAGS = ("success", "finished")
_SCORES = ("reward", "advantage")  # or null
_SUMS = ("total", "square")
_TYPES = {  # the others are strings
  **dict.fromkeys(_COUNTS, (int,)),
  **dict.fromkeys(_FLAGS, (bool,)),
  **dict.fromkeys(_SCORES, (float, NoneType)),
  **dict.fromkeys(_SUMS, (float,)),
}
_LARGEST = 2**53  # of a count: exact in every language's numbers
_ABOVE_ZERO = 1e-4  # float32 rounding of the log-prob of a sure token
_SHIPMENT = {"schema": int, "policy": str, "round": int}
_SHIPMENT |= {"records": int, "bytes": int}


class Shipment(NamedTuple):
  """What could be read of what one policy published in one round."""

  records: tuple[Record, ...]
  refused: tuple[tuple[str, str], ...]  # reason, record ("": all of it)
  policy: str = ""
  round: int = -1
  promised: int = 0  # records that the first line speaks of


def record_id(
  kind: str, round: int, policy: str, prompt_id: str, sample: int
) -> str:
  """A unique name such as trajectory/12/char/p7/3, free of odd characters."""
  parts = (kind, str(round), policy, prompt_id, str(sample))
  return "/".join(
    urllib.parse.quote(part, safe="", errors="surrogatepass") for part in parts
  )


def prompt_hash(text: str) -> str:
  """Tells whether two policies mean the same task by one prompt id."""
  data = text.encode("utf-8", errors="surrogatepass")
  return hashlib.sha256(data).hexdigest()[:32]


def encode(record: Record) -> bytes:
  """The record's line, newline included.

  A reward or an advantage of NaN, which says nothing, is written as null.

  Raises:
    ValueError: Something that no receiver would read; names it.
  """
  content: dict[str, Any] = record.header._asdict() | record._asdict()
  del content["header"]
  try:
    for name, value in content.items():
      content[name] = _plain(name, value)
    _parse(dict(content))
  except (TypeError, ValueError) as error:
    raise ValueError(f"record {record.header.id!r}: {error}") from None
  return seal(content)


def decode(line: bytes) -> Record | str:
  """The record, or why there is none: "schema", "corrupt" or "malformed"."""
  return _decode(line)[0]


def seal(content: Mapping[str, Any]) -> bytes:
  """A line of JSON with the checksum of its content, whatever that says."""
  body = _JSON.encode(content).encode()
  checksum = hashlib.sha256(body).hexdigest().encode()
  return _HEAD + checksum + _MIDDLE + body + b"}\n"


def pack(policy: str, round: int, records: Sequence[Record]) -> bytes:
  """The shipment of these records; ValueError as `encode`."""
  lines = [encode(record) for record in records]
  first = {
    "schema": records_lib.SCHEMA,
    "policy": policy,
    "round": round,
    "records": len(lines),
    "bytes": sum(map(len, lines)),
  }
  return seal(first) + b"".join(lines)


def unpack(data: bytes) -> Shipment:
  """Reads whatever of a shipment is intact.

  A shipment that was cut off costs one refusal, "truncated", and one whose
  first line cannot be used one, "schema" or "corrupt"; so does each damaged
  record, under its id or, where that is lost, the number of its line.
  """
  line, newline, body = data.partition(b"\n")
  if not newline and (line.startswith(_HEAD) or _HEAD.startswith(line)):
    return Shipment((), (("truncated", ""),))
  first = _open(line)
  if first == "schema":
    return Shipment((), (("schema", ""),))
  if isinstance(first, str) or not _is_first(first):
    return Shipment((), (("corrupt", ""),))
  found, refused = [], []
  whole = body[: first["bytes"]]
  lines = whole.split(b"\n")[:-1]  # after the last newline: nothing, or a cut
  for number, line in enumerate(lines, start=1):
    record, name = _decode(line)
    if isinstance(record, str):
      refused.append((record, name or f"line {number}"))
    else:
      found.append(record)
  # A newline that became another byte, or the reverse, damages one record.
  del refused[max(first["records"] - len(found), 0) :]
  lost = len(found) < first["records"] and not refused
  if lost or len(body) < first["bytes"]:
    refused.append(("truncated", ""))
  elif len(body) > first["bytes"] or len(found) > first["records"]:
    refused.append(("malformed", ""))
  return Shipment(
    tuple(found[: first["records"]]),
    tuple(refused),
    first["policy"],
    first["round"],
    first["records"],
  )


def _is_first(content: Mapping[str, Any]) -> bool:
  return content.keys() == _SHIPMENT.keys() and all(
    type(content[name]) is kind
    and (kind is str or 0 <= content[name] <= _LARGEST)
    for name, kind in _SHIPMENT.items()
  )


def _open(line: bytes) -> dict[str, Any] | str:
  """A sealed line's content, or why not.

  The schema is looked at first: how to read the rest depends on it.
  """
  line = line.removesuffix(b"\n")
  marked = line.startswith(_HEAD) or _MIDDLE in line
  broken = "corrupt" if marked else "malformed"
  try:
    outer = json.loads(line.decode())
  except (ValueError, RecursionError):
    return broken
  if not isinstance(outer, dict):
    return broken
  content = outer.get("content", outer)
  if not isinstance(content, dict):
    return broken
  schema = content.get("schema")
  if type(schema) is int and schema != records_lib.SCHEMA:
    return "schema"
  start = len(_HEAD) + hashlib.sha256().digest_size * 2 + len(_MIDDLE)
  body = line[start:-1]
  checksum = hashlib.sha256(body).hexdigest().encode()
  return content if line == _HEAD + checksum + _MIDDLE + body + b"}" else broken


def _decode(line: bytes) -> tuple[Record | str, str]:
  """The record or the reason, and the id, "" where there is none."""
  content = _open(line)
  if isinstance(content, str):
    return content, ""
  name = content.get("id")
  name = name if isinstance(name, str) else ""
  try:
    return _parse(content), name
  except ValueError:
    return "malformed", name


def _plain(name: str, value: Any) -> Any:
  """What JSON holds for a field; NumPy's numbers and lists will do too."""
  if name in _ARRAYS:
    return _base64(name, np.asarray(value))
  if name in _COUNTS:
    return operator.index(value)
  if name in _FLAGS:
    return bool(value)
  if name in _SUMS:
    return float(value)
  if name in _SCORES and value is not None:
    return None if math.isnan(value) else float(value)
  return value


def _base64(name: str, array: np.ndarray) -> str:
  if array.ndim != 1:
    raise ValueError(f"{name}: shape {array.shape}: must be [U]")
  stored = array.astype(_ARRAYS[name])
  if name != "logprobs" and not np.array_equal(stored, array):
    raise ValueError(f"{name}: must be integers of 32 bits")
  return binascii.b2a_base64(stored.tobytes(), newline=False).decode()


def _parse(content: dict[str, Any]) -> Record:
  """The record of a sealed line's content; ValueError names what is wrong."""
  kind = content.get("kind")
  if not isinstance(kind, str) or kind not in _CLASSES:
    allowed = ", ".join(records_lib.KINDS)
    raise ValueError(f"kind: {kind!r}: must be one of {allowed}")
  if content.keys() != _FIELDS[kind]:
    odd = ", ".join(sorted(content.keys() ^ _FIELDS[kind]))
    raise ValueError(f"fields: missing or unknown: {odd}")
  for name, value in content.items():
    _check(name, value)
  for name in _ARRAYS.keys() & content.keys():
    content[name] = _array(name, content[name])
  if kind == "trajectory" and content["reward"] is None:
    content["reward"] = math.nan
  header = records_lib.Header(
    *(content.pop(name) for name in records_lib.Header._fields)
  )
  record = _CLASSES[kind](header=header, **content)
  if isinstance(record, records_lib.Trajectory):
    _check_tokens(record)
  elif isinstance(record, records_lib.Values):
    _check_sums(record)
  return record


def _check(name: str, value: Any) -> None:
  kinds = _TYPES.get(name, (str,))
  if type(value) not in kinds:
    raise ValueError(f"{name}: {value!r}: must be {kinds[0].__name__}")
  if kinds[0] is str:
    if not value and name in ("id", "policy"):
      raise ValueError(f"{name}: must not be empty")
    try:
      value.encode()
    except UnicodeEncodeError:
      raise ValueError(f"{name}: holds half a surrogate pair") from None
  elif kinds[0] is int and not 0 <= value <= _LARGEST:
    raise ValueError(f"{name}: {value}: must be in [0, 2^53]")
  elif kinds[0] is float and value is not None and not math.isfinite(value):
    raise ValueError(f"{name}: {value}: must be finite")


def _array(name: str, text: str) -> np.ndarray:
  data = binascii.a2b_base64(text, strict_mode=True)
  array = np.frombuffer(data, _ARRAYS[name])
  return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_tokens(record: records_lib.Trajectory) -> None:
  size, count = len(record.text.encode()), len(record.tokens)
  ends, logprobs = record.ends, record.logprobs
  if not len(ends) == len(logprobs) == count:
    raise ValueError(
      f"lengths: {count} tokens, {len(ends)} ends, {len(logprobs)} log-probs"
    )
  if not count:
    if size or record.finished:
      raise ValueError("tokens: none, but there is a text or an end")
    return
  if record.tokens.min() < 0:
    raise ValueError("tokens: below 0")
  if ends[0] < 0 or ends[-1] != size or (ends[1:] < ends[:-1]).any():
    raise ValueError(f"ends: must rise to the text's {size} bytes")
  if record.finished and (ends[-2] if count > 1 else 0) != size:
    raise ValueError("ends: of a finished completion, EOS has no bytes")
  if not np.isfinite(logprobs).all() or logprobs.max() > _ABOVE_ZERO:
    raise ValueError("logprobs: must be finite and at most 0")


def _check_sums(record: records_lib.Values) -> None:
  """Refuses sums that no numbers have: (sum r)^2 <= n sum r^2."""
  most = record.count * record.square
  if record.square < 0 or not record.total**2 <= most * (1 + 1e-4) + 1e-30:
    raise ValueError(
      f"sums: count {record.count}, total {record.total}, square "
      f"{record.square}: no numbers have these"
    )
