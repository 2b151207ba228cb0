"""Files that survive a crash, folders that one run holds, and data as text."""
