"""Meshes, and where arrays lie on them."""
