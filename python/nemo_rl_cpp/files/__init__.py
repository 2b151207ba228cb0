"""Crash-safe files, locks on folders, and plain data as text."""
