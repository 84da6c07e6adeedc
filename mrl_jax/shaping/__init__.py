"""Meta-learned potentials: what a prefix of a response promises."""
