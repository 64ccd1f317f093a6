"""The screen: Textual and frozen views, nothing else."""
