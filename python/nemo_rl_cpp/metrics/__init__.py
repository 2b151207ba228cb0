"""What a run costs: time, memory, and how informative its batches were."""
