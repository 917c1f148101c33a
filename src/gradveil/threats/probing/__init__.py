"""The machinery of probes: running a defence with chosen secrets, and looking for what it does."""
