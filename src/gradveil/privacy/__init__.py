"""Where secret randomness comes from, and Gaussian noise whose rounding gives nothing away."""

from gradveil.privacy import draws as draws
