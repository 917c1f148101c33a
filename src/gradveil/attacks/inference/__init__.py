"""Machinery: classes and representations read off the update of fully connected layers."""
