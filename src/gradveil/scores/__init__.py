"""How much each entry of a representation gives away."""
