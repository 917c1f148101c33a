"""Where secret randomness comes from, and Gaussian noise whose rounding gives nothing away."""
