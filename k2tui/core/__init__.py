"""Values and pure functions. Time comes as an argument; no clock, file, process, socket or screen is known here."""
