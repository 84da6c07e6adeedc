"""What a Hugging Face directory says about its tokenizer.

The vocabulary lives in `tokenizer.json` (or, in older checkpoints, in a
SentencePiece `tokenizer.model`, which is converted on the fly). Everything
else is spread over small files: which tokens have a role, the chat template,
and the ids that end a completion. `read` gathers them in one record, with the
added tokens completed so that the vocabulary file alone is enough from there.
"""

import json
import pathlib
import shutil
import tempfile
from typing import Any, NamedTuple

VOCABULARIES = ("tokenizer.json", "tokenizer.model")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Files(NamedTuple):
  """The tokenizer's files, parsed."""

  state: dict[str, Any]  # tokenizer.json
  roles: dict[str, str]  # "eos_token" -> "</s>"
  special: frozenset[str]  # contents of all special tokens
  adds_bos: bool | None  # None: the vocabulary file decides
  chat_template: str | None
  generation_eos: tuple[int, ...]
  config_eos: tuple[int, ...]


def read(directory: str) -> Files:
  """Reads the tokenizer's files.

  Raises:
    FileNotFoundError: the directory holds no vocabulary.
    ValueError: a file is not what its name promises.
  """
  root = pathlib.Path(directory)
  config = _json(root / "tokenizer_config.json")
  state = _state(root)
  roles, extra = _named({**_json(root / "special_tokens_map.json"), **config})
  _complete(state, config, {*roles.values(), *extra})
  added = state["added_tokens"]
  flagged = {
    token["content"]
    for token in added
    if token["special"] and not token["content"].startswith(HOLE)
  }
  return Files(
    state=state,
    roles=roles,
    special=frozenset(flagged.union(roles.values(), extra)),
    adds_bos=config.get("add_bos_token"),
    chat_template=_chat_template(root, config),
    generation_eos=_eos(root / "generation_config.json"),
    config_eos=_eos(root / "config.json"),
  )


def _json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(content, dict):
    raise ValueError(f"{path} must hold a JSON object, not {content!r:.40}")
  return content


def _state(root: pathlib.Path) -> dict[str, Any]:
  if (root / "tokenizer.json").is_file():
    state = _json(root / "tokenizer.json")
    if not isinstance(state.get("model"), dict):
      raise ValueError(f"{root / 'tokenizer.json'} has no 'model'")
  elif (root / "tokenizer.model").is_file():
    state = _from_sentencepiece(root / "tokenizer.model")
  else:
    looked = ", ".join(VOCABULARIES)
    raise FileNotFoundError(
      f"no tokenizer in directory {str(root)!r}: looked for {looked}"
    )
  state["added_tokens"] = [dict(t) for t in state.get("added_tokens") or ()]
  return state


def _from_sentencepiece(path: pathlib.Path) -> dict[str, Any]:
  # Imported here: transformers takes a second to import, and almost every
  # checkpoint has a tokenizer.json.
  import transformers

  # Alone in a directory, so that nothing but the model's own settings counts:
  # a tokenizer class named beside it may order the merges in another way.
  with tempfile.TemporaryDirectory() as alone:
    shutil.copy(path, pathlib.Path(alone, "tokenizer.model"))
    try:
      slow = transformers.AutoTokenizer.from_pretrained(alone)
      return json.loads(slow.backend_tokenizer.to_str())
    except Exception as error:
      raise ValueError(f"cannot convert {path}: {error}") from error


def _content(value: Any) -> str | None:
  return value.get("content") if isinstance(value, dict) else value


def _named(config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
  roles = {}
  for role in ROLES:
    content = _content(config.get(f"{role}_token"))
    if isinstance(content, str) and content:
      roles[f"{role}_token"] = content
  extra: list[str] = []
  for field in ("additional_special_tokens", "extra_special_tokens"):
    values = config.get(field) or ()
    values = values.values() if isinstance(values, dict) else values
    extra += [c for c in map(_content, values) if isinstance(c, str) and c]
  return roles, extra


def model_vocabulary(state: dict[str, Any]) -> dict[str, int]:
  """Token -> id of the model, without the added tokens."""
  vocabulary = state["model"]["vocab"]
  if isinstance(vocabulary, dict):
    return vocabulary
  return {piece: i for i, (piece, _) in enumerate(vocabulary)}


def _complete(state: dict, config: dict[str, Any], named: set[str]) -> None:
  """Makes the list of added tokens whole, in order and free of gaps.

  A special token may be declared in tokenizer_config.json alone. The library
  numbers added tokens by their order and not by the id they state, so a gap
  in the ids is filled with a token that no text contains.
  """
  added = {token["id"]: token for token in state["added_tokens"]}
  vocabulary = model_vocabulary(state)
  declared = config.get("added_tokens_decoder") or {}
  for number, fields in declared.items():
    if int(number) not in added:
      added[int(number)] = _added(int(number), **fields)
  contents = {token["content"] for token in added.values()}
  for content in sorted(named - contents):
    if content in vocabulary:
      added[vocabulary[content]] = _added(vocabulary[content], content)
  taken = set(vocabulary.values())
  for number in range(max([*added, -1])):
    if number not in added and number not in taken:
      added[number] = _added(number, f"{HOLE}{number}{HOLE}")
  state["added_tokens"] = [added[number] for number in sorted(added)]


HOLE = "\ufdd0"  # a Unicode noncharacter; marks an id that has no token


def _added(number: int, content: str, special: bool = True, **flags) -> dict:
  names = ("single_word", "lstrip", "rstrip", "normalized")
  chosen = {name: bool(flags.get(name, False)) for name in names}
  return {"id": number, "content": content, "special": special, **chosen}


def _chat_template(root: pathlib.Path, config: dict) -> str | None:
  path = root / "chat_template.jinja"
  if path.is_file():
    return path.read_text(encoding="utf-8")
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    named = {entry["name"]: entry["template"] for entry in template}
    template = named.get("default")
  if template is None:
    template = _json(root / "chat_template.json").get("chat_template")
  return template or None


def _eos(path: pathlib.Path) -> tuple[int, ...]:
  value = _json(path).get("eos_token_id")
  ids = value if isinstance(value, list) else [value]
  ids = [i for i in ids if i is not None]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise ValueError(
      f"{path}: eos_token_id must be an id or a list of ids, got {value!r}"
    )
  return tuple(ids)
