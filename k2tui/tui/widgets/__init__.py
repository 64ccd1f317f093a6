"""Widgets that know no domain word."""
