"""Arrays, integers, batches, derivatives and errors: helpers that know nothing of attention."""
