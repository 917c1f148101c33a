"""Attacks, one file each; folders hold their machinery. Nothing here may import a defence, a client or data."""
