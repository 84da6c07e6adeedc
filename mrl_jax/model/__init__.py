"""The decoder, seen from outside as pure functions over parameters."""
