"""Adapters to other engines and trainers; each needs its extra."""
