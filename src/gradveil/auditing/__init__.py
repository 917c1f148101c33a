"""Audits: a run from its settings to a folder of rows."""
