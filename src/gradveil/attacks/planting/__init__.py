"""What malicious attacks share: rows that a server puts into a model, and what their gradients show."""
