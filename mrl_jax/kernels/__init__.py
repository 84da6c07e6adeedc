"""Pure functions from arrays to arrays, each with its equation."""
