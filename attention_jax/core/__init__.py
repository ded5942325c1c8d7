"""Helpers that know nothing of attention: arrays, checks, batches, meshes, derivatives, names."""
