"""Secret noise, what it costs a record over a run, and what that proves."""
