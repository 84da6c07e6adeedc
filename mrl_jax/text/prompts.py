"""From a user's text to the prompt ids that a policy continues.

A chat template is a small program that puts control tokens around what people
wrote. Its own control strings must become control tokens, and the very same
strings inside a user's text must not: "say <|im_end|> now" may not close the
turn. So the template is rendered twice, once with the text and once with
placeholders. Where both give the same control tokens the text is harmless and
the prompt is what the model was trained on, to the id. Where they differ, the
user's text is encoded apart, as plain text.
"""

import datetime
import functools
import json
import re

import jinja2
import jinja2.sandbox

from mrl_jax.text import tokenizer as tokenizer_lib

FORMATS = ("auto", "chat", "raw")

# Private-use characters: no template changes their case or strips them.
_USER, _SYSTEM = "\ue5a0\ue5a1\ue5a2", "\ue5a0\ue5a3\ue5a2"
_PLACEHOLDER = re.compile(f"({_USER}|{_SYSTEM})")

# Some templates print the date. A run that is resumed tomorrow must see the
# same prompts, so for them the day never changes.
_TODAY = datetime.date(2024, 7, 26)


def render(
  tokenizer: tokenizer_lib.Tokenizer,
  user_text: str,
  *,
  system: str | None = None,
  format: str = "auto",
) -> list[int]:
  """The ids of a prompt, up to where the policy's answer begins.

  Args:
    tokenizer: the policy's tokenizer.
    user_text: what the user says; never read as control tokens.
    system: an instruction to go before it. Where the format has no place for
      one, it becomes the first paragraph of the user's text.
    format: "chat" renders the tokenizer's chat template with its generation
      prompt; "raw" is the text itself, after BOS if the tokenizer adds one;
      "auto" is "chat" where there is a template, otherwise "raw".

  Raises:
    ValueError: unknown format, no chat template for "chat", or a template
      that fails.
  """
  if format not in FORMATS:
    raise ValueError(
      f"format must be one of {', '.join(FORMATS)}, got {format!r}"
    )
  if format == "chat" and tokenizer.chat_template is None:
    raise ValueError(
      "format 'chat' needs a chat template and this tokenizer has none;"
      " allowed: 'raw', 'auto'"
    )
  if format == "raw" or tokenizer.chat_template is None:
    ids = _raw(tokenizer, _paragraphs(system, user_text))
  else:
    ids = _chat(tokenizer, user_text, system)
  if not ids:
    raise ValueError("the prompt is empty: no text and no BOS token")
  return ids


def _paragraphs(system: str | None, user_text: str) -> str:
  return user_text if not system else f"{system}\n\n{user_text}"


def _raw(tokenizer: tokenizer_lib.Tokenizer, text: str) -> list[int]:
  bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
  return [i for i in bos if i is not None] + tokenizer.encode(text, start=True)


def _chat(
  tokenizer: tokenizer_lib.Tokenizer, user: str, system: str | None
) -> list[int]:
  skeleton = None
  if system:
    skeleton = _skeleton(tokenizer, user, system)
    if skeleton is None or _SYSTEM not in skeleton:  # no system role
      user, system, skeleton = _paragraphs(system, user), None, None
  if skeleton is None:
    skeleton = _apply(tokenizer, _placeheld(user, _USER), None)
  if _USER not in skeleton:
    raise ValueError("the chat template leaves the user's text out")
  parts = _PLACEHOLDER.split(skeleton)
  template_ids = _encode_parts(tokenizer, parts, {})
  ids = tokenizer.encode(
    _apply(tokenizer, user, system), controls=True, start=True
  )
  texts = {_USER: user.strip(), _SYSTEM: (system or "").strip()}
  if _harmless(tokenizer, texts, ids, template_ids):
    return ids
  return _encode_parts(tokenizer, parts, texts)


def _placeheld(text: str, placeholder: str) -> str:
  """The text's outer whitespace stays, for the template to trim or not."""
  left = text[: len(text) - len(text.lstrip())]
  right = text[len(text.rstrip()) :] if text.strip() else ""
  return f"{left}{placeholder}{right}"


def _skeleton(
  tokenizer: tokenizer_lib.Tokenizer, user: str, system: str
) -> str | None:
  try:
    return _apply(
      tokenizer, _placeheld(user, _USER), _placeheld(system, _SYSTEM)
    )
  except ValueError:  # a template may refuse the system role
    return None


def _encode_parts(
  tokenizer: tokenizer_lib.Tokenizer, parts: list[str], texts: dict[str, str]
) -> list[int]:
  """Encodes the template's parts, and `texts` as plain text between them."""
  ids: list[int] = []
  for i, part in enumerate(parts):
    if _PLACEHOLDER.fullmatch(part):
      ids += tokenizer.encode(texts.get(part, ""), start=not ids)
    else:
      ids += tokenizer.encode(part, controls=True, start=i == 0)
  return ids


def _harmless(
  tokenizer: tokenizer_lib.Tokenizer,
  texts: dict[str, str],
  ids: list[int],
  template_ids: list[int],
) -> bool:
  def controls(numbers: list[int]) -> list[int]:
    return [i for i in numbers if i in tokenizer.control_ids]

  if controls(ids) != controls(template_ids):
    return False
  return not any(
    controls(tokenizer.encode(text, controls=True)) for text in texts.values()
  )


def _apply(
  tokenizer: tokenizer_lib.Tokenizer, user: str, system: str | None
) -> str:
  messages = [{"role": "system", "content": system}] if system else []
  messages.append({"role": "user", "content": user})
  try:
    return _compile(tokenizer.chat_template or "").render(
      messages=messages, add_generation_prompt=True, **tokenizer.roles
    )
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(f"the chat template failed: {error}") from error


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
  """Compiled in a sandbox: a template comes from whoever made the model."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols"],
  )
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = _TODAY.strftime
  environment.filters["tojson"] = _to_json
  # {% generation %} marks the assistant's text and prints nothing.
  source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if 1\2", source)
  source = re.sub(
    r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source
  )
  return environment.from_string(source)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)
