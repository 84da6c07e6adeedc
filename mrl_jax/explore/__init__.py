"""ExTra: what a policy has tried before, and where to try again."""
