"""Panels of the dashboard, one file each."""
