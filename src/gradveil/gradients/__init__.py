"""The gradients that a client would send, of many problems at once."""
