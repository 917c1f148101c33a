"""The whole way, top to bottom: configuration, run, results on disk."""
