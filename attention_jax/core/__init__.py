"""What knows nothing of attention: arrays, checks, batches, meshes, derivatives, names."""
