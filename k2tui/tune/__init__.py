"""The tuner: trial after trial, each a real start, a real benchmark and a real stop; a trial that hangs is a row, not the end."""
