"""Another engine, for tests: answers requests last first, without entropies."""

import numpy as np

from mrl_jax.sampling import adapter, engine


def make(model, mesh, *, samples, limit, **options):
  """Called as `engine.make` is, whose draws it takes for its own."""
  own = engine.make(model, mesh, samples=samples, limit=limit, **options)

  def complete(params, requests):
    prompts = [list(r.prompt) for r in requests[::samples]]
    names = np.asarray([r.words for r in requests], np.uint32)
    drawn = own(params, prompts, names)
    for request in reversed(requests):
      row, length = request.number, drawn.lengths[request.number]
      yield adapter.Completion(
        row,
        drawn.tokens[row, :length],
        drawn.logprobs[row, :length],
        bool(drawn.finished[row]),
      )

  return adapter.adapt(complete, samples, limit)
