"""The playground: one client's example, what it sends, and what servers make of it, live."""
