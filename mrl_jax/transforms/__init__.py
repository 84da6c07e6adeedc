"""Batch to batch: what each token is worth."""
