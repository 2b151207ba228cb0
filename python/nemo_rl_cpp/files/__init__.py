"""Crash-safe files, folder locks, and plain data as text."""
