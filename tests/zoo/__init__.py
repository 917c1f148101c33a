"""Defences whose truth is known, and what holds the audit to it."""
