"""SEE, the shared experience exchange: what policies tell each other."""
