"""What arrays and derivatives need everywhere; it knows nothing of attention."""
