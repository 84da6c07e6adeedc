"""`chain`: the one way to put transforms together (after optax)."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def chain(*transforms: Callable[[T], T]) -> Callable[[T], T]:
  """Applies `transforms` from left to right; `chain()` is the identity."""

  def apply(value: T) -> T:
    for transform in transforms:
      value = transform(value)
    return value

  return apply
